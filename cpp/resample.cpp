// Antialiased resampling (the filter widens when an image shrinks) in 22-bit fixed point, horizontal pass first.
#include <algorithm>
#include <cmath>

#include "image.h"

namespace {

constexpr int bits = 22;

double filter_weight(Filter filter, double x) {
  x = std::fabs(x);
  if (filter == Filter::bilinear) return x < 1 ? 1 - x : 0;
  constexpr double a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

// Inputs of one output, and their weights.
struct Taps {
  int first;
  std::vector<int> weights;
};

std::vector<Taps> compute_taps(int inputs, double low, double high, int outputs, Filter filter) {
  const double scale = (high - low) / outputs, wide = std::max(scale, 1.0);
  const double reach = (filter == Filter::bilinear ? 1.0 : 2.0) * wide;
  std::vector<Taps> all;
  for (int output = 0; output < outputs; ++output) {
    const double center = low + (output + 0.5) * scale;
    const int first = std::max(int(center - reach + 0.5), 0);
    const int end = std::min(int(center + reach + 0.5), inputs);
    std::vector<double> weights;
    double sum = 0;
    for (int input = first; input < end; ++input) {
      weights.push_back(filter_weight(filter, (input - center + 0.5) * (1.0 / wide)));
      sum += weights.back();
    }
    Taps taps{first, {}};
    for (double weight : weights) {
      const double fixed = (sum != 0 ? weight / sum : weight) * (1 << bits);
      taps.weights.push_back(int(fixed < 0 ? fixed - 0.5 : fixed + 0.5));
    }
    all.push_back(taps);
  }
  return all;
}

uint8_t clip8(int64_t sum) { return uint8_t(std::clamp<int64_t>(sum >> bits, 0, 255)); }

}  // namespace

Image resample(const Image& image, int height, int width, Box box, Filter filter) {
  Image across = image;
  if (width != image.width || box.left != 0 || box.right != image.width) {
    across = Image(image.height, width, image.channels);
    const auto taps = compute_taps(image.width, box.left, box.right, width, filter);
    for (int row = 0; row < image.height; ++row)
      for (int column = 0; column < width; ++column)
        for (int channel = 0; channel < image.channels; ++channel) {
          int64_t sum = 1 << (bits - 1);
          for (size_t k = 0; k < taps[column].weights.size(); ++k)
            sum += int64_t(image.at(row, taps[column].first + int(k), channel)) * taps[column].weights[k];
          across.at(row, column, channel) = clip8(sum);
        }
  }
  if (height == image.height && box.top == 0 && box.bottom == image.height) return across;
  Image down(height, width, image.channels);
  const auto taps = compute_taps(image.height, box.top, box.bottom, height, filter);
  for (int row = 0; row < height; ++row)
    for (int column = 0; column < width; ++column)
      for (int channel = 0; channel < image.channels; ++channel) {
        int64_t sum = 1 << (bits - 1);
        for (size_t k = 0; k < taps[row].weights.size(); ++k)
          sum += int64_t(across.at(taps[row].first + int(k), column, channel)) * taps[row].weights[k];
        down.at(row, column, channel) = clip8(sum);
      }
  return down;
}
