// Read PNG and JPEG files.
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include <jpeglib.h>
#include <png.h>

#include "image.h"

namespace {

constexpr int64_t max_pixels = 64'000'000;

void check_size(int64_t width, int64_t height) {
  if (width < 1 || height < 1 || width * height > max_pixels) throw std::runtime_error("too many pixels");
}

std::vector<uint8_t> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Blend one color with white, with the rounding of 8-bit compositing with seven spare bits.
uint8_t over_white(uint32_t color, uint32_t alpha) {
  if (alpha == 0) return 255;
  const uint32_t weight = alpha * 255 * 255 * 128 / (255 * 255);
  const uint32_t mixed = color * weight + 255 * (255 * 128 - weight) + (128 << 7);
  return uint8_t((((mixed >> 8) + mixed) >> 8) >> 7);
}

Image read_png(const std::vector<uint8_t>& data) {
  png_image png;
  std::memset(&png, 0, sizeof png);
  png.version = PNG_IMAGE_VERSION;
  if (!png_image_begin_read_from_memory(&png, data.data(), data.size())) throw std::runtime_error(png.message);
  const bool color = png.format & PNG_FORMAT_FLAG_COLOR;
  if (int64_t(png.width) * png.height > max_pixels) {
    png_image_free(&png);
    throw std::runtime_error("too many pixels");
  }
  png_image_free(&png);

  // Pixels are read through the low-level interface, since the simplified one above would apply gamma.
  struct Source {
    const std::vector<uint8_t>& data;
    size_t position;
  } source{data, 0};
  png_structp reader = png_create_read_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(reader);
  std::vector<uint8_t> raw;
  std::vector<png_bytep> rows;
  if (setjmp(png_jmpbuf(reader))) {
    png_destroy_read_struct(&reader, &info, nullptr);
    throw std::runtime_error("broken PNG");
  }
  png_set_read_fn(reader, &source, [](png_structp reader, png_bytep out, size_t count) {
    auto* from = static_cast<Source*>(png_get_io_ptr(reader));
    if (from->position + count > from->data.size()) png_error(reader, "truncated");
    std::memcpy(out, from->data.data() + from->position, count);
    from->position += count;
  });
  png_read_info(reader, info);
  const bool palette =
      png_get_color_type(reader, info) == PNG_COLOR_TYPE_PALETTE && !png_get_valid(reader, info, PNG_INFO_tRNS);
  png_set_scale_16(reader);
  png_set_expand(reader);
  png_set_add_alpha(reader, 255, PNG_FILLER_AFTER);
  png_set_interlace_handling(reader);
  png_read_update_info(reader, info);
  const int width = int(png_get_image_width(reader, info)), height = int(png_get_image_height(reader, info));
  const int parts = png_get_channels(reader, info);
  raw.resize(png_get_rowbytes(reader, info) * size_t(height));
  for (int row = 0; row < height; ++row) rows.push_back(raw.data() + png_get_rowbytes(reader, info) * row);
  png_read_image(reader, rows.data());
  png_read_end(reader, nullptr);
  png_destroy_read_struct(&reader, &info, nullptr);

  Image image(height, width, color ? 3 : 1);
  image.palette = palette;
  for (size_t position = 0; position < size_t(height) * width; ++position)
    for (int channel = 0; channel < image.channels; ++channel) {
      const uint8_t* pixel = raw.data() + position * parts;
      const uint8_t alpha = pixel[parts - 1];
      image.pixels[position * image.channels + channel] =
          alpha == 255 ? pixel[channel] : over_white(pixel[channel], alpha);
    }
  return image;
}

struct JpegError {
  jpeg_error_mgr base;
  jmp_buf jump;
};

Image read_jpeg(const std::vector<uint8_t>& data) {
  jpeg_decompress_struct reader;
  JpegError error;
  Image image;
  reader.err = jpeg_std_error(&error.base);
  error.base.error_exit = [](j_common_ptr info) { std::longjmp(reinterpret_cast<JpegError*>(info->err)->jump, 1); };
  error.base.output_message = [](j_common_ptr) {};
  if (setjmp(error.jump)) {
    jpeg_destroy_decompress(&reader);
    throw std::runtime_error("broken JPEG");
  }
  jpeg_create_decompress(&reader);
  jpeg_mem_src(&reader, data.data(), data.size());
  jpeg_read_header(&reader, TRUE);
  reader.out_color_space = reader.jpeg_color_space == JCS_GRAYSCALE ? JCS_GRAYSCALE : JCS_RGB;
  if (int64_t(reader.image_width) * reader.image_height > max_pixels) std::longjmp(error.jump, 1);
  jpeg_start_decompress(&reader);
  image = Image(int(reader.output_height), int(reader.output_width), reader.output_components);
  while (reader.output_scanline < reader.output_height) {
    JSAMPROW row = &image.at(int(reader.output_scanline), 0);
    jpeg_read_scanlines(&reader, &row, 1);
  }
  jpeg_finish_decompress(&reader);
  jpeg_destroy_decompress(&reader);
  return image;
}

}  // namespace

Image read_image(const std::string& path, int channels) {
  const auto data = read_file(path);
  Image image;
  if (data.size() > 8 && !std::memcmp(data.data(), "\x89PNG\r\n\x1a\n", 8))
    image = read_png(data);
  else if (data.size() > 3 && data[0] == 0xff && data[1] == 0xd8)
    image = read_jpeg(data);
  else
    throw std::runtime_error("neither PNG nor JPEG");
  check_size(image.width, image.height);
  if (image.channels == channels) return image;
  Image other(image.height, image.width, channels);
  for (size_t position = 0; position < size_t(image.height) * image.width; ++position)
    if (channels == 1) {
      const uint8_t* rgb = image.pixels.data() + 3 * position;
      other.pixels[position] =
          image.palette ? uint8_t((rgb[0] * 299u + rgb[1] * 587u + rgb[2] * 114u) / 1000u)
                        : uint8_t((rgb[0] * 19595u + rgb[1] * 38470u + rgb[2] * 7471u + 0x8000u) >> 16);
    } else {
      for (int channel = 0; channel < 3; ++channel) other.pixels[3 * position + channel] = image.pixels[position];
    }
  return other;
}
