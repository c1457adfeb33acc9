// Eight-bit pixels in rows, one or three channels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Image {
  int height = 0;
  int width = 0;
  int channels = 0;
  bool palette = false;  // colors from a palette, whose conversion to gray rounds differently
  std::vector<uint8_t> pixels;

  Image() = default;
  Image(int height, int width, int channels)
      : height(height), width(width), channels(channels), pixels(size_t(height) * width * channels) {}

  uint8_t& at(int row, int column, int channel = 0) {
    return pixels[(size_t(row) * width + column) * channels + channel];
  }
  uint8_t at(int row, int column, int channel = 0) const {
    return pixels[(size_t(row) * width + column) * channels + channel];
  }
};

// Read a PNG or JPEG file, detected by content, with one or three channels; transparent pixels are blended with white.
Image read_image(const std::string& path, int channels);

struct Box {
  double left, top, right, bottom;
};
enum class Filter { bilinear, bicubic };

// Resize a box of an image.
Image resample(const Image& image, int height, int width, Box box, Filter filter);

// Convert an image to model input: digits are centered as in MNIST, photographs are center-cropped and resized.
Image fit_digit(const Image& gray, int size);
Image fit_photo(const Image& image, int height, int width, double crop);
