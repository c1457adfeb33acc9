"""Benchmark worker: tf.data, which decodes only the crop.

tfdata_loader.py FOLDER BATCHES
"""

import sys

import tensorflow as tf

from peers.loading import AREA, ASPECT, BATCH, SIZE, WORKERS, find_images, serve_batches

PREFETCHED = 2  # batches: AUTOTUNE adds more and more while other loaders have their turns, which it then disturbs


def load_image(path: tf.Tensor) -> tf.Tensor:
    data = tf.io.read_file(path)
    box = tf.zeros((1, 0, 4))
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        box,
        area_range=AREA,
        aspect_ratio_range=ASPECT,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], size[0], size[1]])
    image = tf.image.resize(tf.image.decode_and_crop_jpeg(data, window, channels=3), (SIZE, SIZE))
    return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)


def main() -> None:
    paths = find_images(sys.argv[1])
    dataset = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat()
    dataset = dataset.map(load_image, num_parallel_calls=WORKERS).batch(BATCH).prefetch(PREFETCHED)
    serve_batches(dataset.as_numpy_iterator(), int(sys.argv[2]))


if __name__ == "__main__":
    main()
