// Eight-bit pixels in rows, one or three channels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Image {
  int height = 0;
  int width = 0;
  int channels = 0;
  bool palette = false;  // the colors came from a table, whose grays are rounded in another way
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

// The picture in a PNG or JPEG file, told apart by content, with one or three channels, on white where transparent.
Image read_picture(const std::string& path, int channels);

// A picture resampled: the part (left, top, right, bottom) of it, in the given size.
struct Box {
  double left, top, right, bottom;
};
enum class Filter { bilinear, bicubic };
Image resample(const Image& image, int height, int width, Box box, Filter filter);

// A picture as the input of a network: digits centered as MNIST does it, photographs scaled and cut to the middle.
Image fit_digit(const Image& gray, int size);
Image fit_photo(const Image& image, int height, int width, double share);
