// Image to model input, step by step as in convolve.inference.preprocess.
#include <algorithm>
#include <array>
#include <cmath>

#include "image.h"

namespace {

constexpr double ink_box = 20.0 / 28.0, faintest_ink = 0.3;

std::vector<uint8_t> border(const Image& gray) {
  std::vector<uint8_t> values;
  for (int row : {0, gray.height - 1})
    for (int column = 0; column < gray.width; ++column) values.push_back(gray.at(row, column));
  for (int column : {0, gray.width - 1})
    for (int row = 1; row < gray.height - 1; ++row) values.push_back(gray.at(row, column));
  return values;
}

// Return Otsu's threshold, which maximizes the variance between the two classes.
int otsu_threshold(const Image& gray) {
  std::array<double, 256> counts{};
  for (uint8_t value : gray.pixels) counts[value] += 1;
  double mean = 0;
  for (int value = 0; value < 256; ++value) mean += counts[value] * value;
  const double total = double(gray.pixels.size());
  double below = 0, moment = 0, best = 0;
  int threshold = 0;
  for (int value = 0; value < 256; ++value) {
    below += counts[value];
    moment += counts[value] * value;
    const double weight = below * (total - below);
    const double between = weight > 0 ? std::pow(mean * below - moment * total, 2) / weight : 0;
    if (between > best) best = between, threshold = value;
  }
  return threshold;
}

bool is_dark_on_light(const Image& gray) {
  const auto [low, high] = std::minmax_element(gray.pixels.begin(), gray.pixels.end());
  if (*low == *high) return *low > 127;
  const int threshold = otsu_threshold(gray);
  const auto edge = border(gray);
  const auto bright = std::count_if(edge.begin(), edge.end(), [threshold](uint8_t value) { return value > threshold; });
  return double(bright) / double(edge.size()) > 0.5;
}

// Return a quantile, interpolated linearly.
double quantile(std::vector<uint8_t> values, double fraction) {
  std::sort(values.begin(), values.end());
  const double position = fraction * double(values.size() - 1);
  const size_t lower = size_t(position), upper = std::min(lower + 1, values.size() - 1);
  return values[lower] + (double(values[upper]) - values[lower]) * (position - double(lower));
}

Image crop_ink(const Image& ink) {
  const int top = *std::max_element(ink.pixels.begin(), ink.pixels.end());
  const double faintest = std::min(2.0 * quantile(border(ink), 0.95), faintest_ink * top);
  int first_row = ink.height, last_row = -1, first_column = ink.width, last_column = -1;
  for (int row = 0; row < ink.height; ++row)
    for (int column = 0; column < ink.width; ++column)
      if (ink.at(row, column) > faintest) {
        first_row = std::min(first_row, row), last_row = std::max(last_row, row);
        first_column = std::min(first_column, column), last_column = std::max(last_column, column);
      }
  if (last_row < 0) return ink;
  Image cut(last_row - first_row + 1, last_column - first_column + 1, 1);
  for (int row = 0; row < cut.height; ++row)
    for (int column = 0; column < cut.width; ++column) {
      const uint8_t value = ink.at(first_row + row, first_column + column);
      cut.at(row, column) = value > faintest ? value : 0;
    }
  return cut;
}

Image scale_ink(const Image& ink, int box) {
  const int longer = std::max(ink.height, ink.width);
  if (longer == box) return ink;
  const int width = std::max(int(std::nearbyint(double(ink.width) * box / longer)), 1);
  const int height = std::max(int(std::nearbyint(double(ink.height) * box / longer)), 1);
  Image small = resample(ink, height, width, {0, 0, double(ink.width), double(ink.height)}, Filter::bicubic);
  const double bright = *std::max_element(ink.pixels.begin(), ink.pixels.end());
  const double gain = bright / std::max<double>(*std::max_element(small.pixels.begin(), small.pixels.end()), 1.0);
  for (uint8_t& value : small.pixels) value = uint8_t(std::clamp(std::nearbyint(value * gain), 0.0, 255.0));
  return small;
}

Image place_ink(const Image& ink, int size) {
  double total = 0, rows = 0, columns = 0;
  for (int row = 0; row < ink.height; ++row)
    for (int column = 0; column < ink.width; ++column) {
      const double weight = ink.at(row, column);
      total += weight, rows += weight * row, columns += weight * column;
    }
  const double row = total ? rows / total : (ink.height - 1) / 2.0;
  const double column = total ? columns / total : (ink.width - 1) / 2.0;
  const int top = int(std::clamp(std::nearbyint(size / 2.0 - row), 0.0, double(size - ink.height)));
  const int left = int(std::clamp(std::nearbyint(size / 2.0 - column), 0.0, double(size - ink.width)));
  Image canvas(size, size, 1);
  for (int y = 0; y < ink.height; ++y)
    for (int x = 0; x < ink.width; ++x) canvas.at(top + y, left + x) = ink.at(y, x);
  return canvas;
}

}  // namespace

Image fit_digit(const Image& gray, int size) {
  const bool dark = is_dark_on_light(gray);
  if (gray.height == size && gray.width == size && !dark) return gray;
  Image ink = gray;
  if (dark)
    for (uint8_t& value : ink.pixels) value = uint8_t(255 - value);
  const uint8_t paper = uint8_t(quantile(border(ink), 0.5));
  for (uint8_t& value : ink.pixels) value = uint8_t(std::max(value, paper) - paper);
  return place_ink(scale_ink(crop_ink(ink), int(std::nearbyint(size * ink_box))), size);
}

Image fit_photo(const Image& image, int height, int width, double crop) {
  if (image.height == height && image.width == width) return image;
  const int side = std::max(1, int(std::nearbyint(std::min(image.height, image.width) * crop)));
  const int top = (image.height - side) / 2, left = (image.width - side) / 2;
  Image part(side, side, image.channels);
  for (int row = 0; row < side; ++row)
    std::copy_n(&image.pixels[(size_t(top + row) * image.width + left) * image.channels],
                size_t(side) * image.channels, &part.at(row, 0));
  return resample(part, height, width, {0, 0, double(side), double(side)}, Filter::bilinear);
}
