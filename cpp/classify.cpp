// classify MODEL.aoti.pt2 PICTURE...: one line for each picture: file, class, probability.
// classify --pixels MODEL.aoti.pt2 PICTURE...: the network's input instead, as hexadecimal bytes.
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include "image.h"

namespace {

// What the package says about the network.
struct Card {
  std::vector<std::string> classes;
  int height = 0, width = 0, channels = 0;
  std::string fit;
  double share = 1;
};

Card read_card(torch::inductor::AOTIModelPackageLoader& package) {
  auto strings = package.get_metadata();
  Card card;
  std::istringstream names(strings["classes"]), shape(strings["shape"]);
  for (std::string name; std::getline(names, name);) card.classes.push_back(name);
  shape >> card.height >> card.width >> card.channels;
  card.fit = strings["fit"];
  std::istringstream(strings["crop"]) >> card.share;
  if (card.classes.empty() || card.height < 1) throw std::runtime_error("the package has no card of convolve");
  return card;
}

Image prepare(const std::string& path, const Card& card) {
  const Image picture = read_picture(path, card.channels);
  if (card.fit == "digit") return fit_digit(picture, card.height);
  return fit_photo(picture, card.height, card.width, card.share);
}

void print_class(torch::inductor::AOTIModelPackageLoader& package, const Card& card, const char* path, Image input) {
  auto pixels = torch::from_blob(input.pixels.data(), {1, card.height, card.width, card.channels}, torch::kUInt8);
  const auto shares = package.run({pixels})[0].softmax(1)[0];
  const auto best = shares.argmax().item<int64_t>();
  std::printf("%s\t%s\t%.6f\n", path, card.classes[best].c_str(), shares[best].item<float>());
}

}  // namespace

int main(int count, char** words) {
  const bool only_pixels = count > 1 && !std::strcmp(words[1], "--pixels");
  const int first = only_pixels ? 2 : 1;
  if (count < first + 2) {
    std::fprintf(stderr, "usage: classify [--pixels] MODEL.aoti.pt2 PICTURE...\n");
    return 2;
  }
  c10::InferenceMode inference;
  int failures = 0;
  try {
    torch::inductor::AOTIModelPackageLoader package(words[first]);
    const Card card = read_card(package);
    for (int index = first + 1; index < count; ++index) try {
        Image input = prepare(words[index], card);
        if (!only_pixels) {
          print_class(package, card, words[index], std::move(input));
          continue;
        }
        std::printf("%s\t", words[index]);
        for (uint8_t value : input.pixels) std::printf("%02x", value);
        std::printf("\n");
      } catch (const std::exception& error) {
        std::fprintf(stderr, "classify: %s: %s\n", words[index], error.what());
        ++failures;
      }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "classify: %s: %s\n", words[first], error.what());
    return 1;
  }
  return failures ? 1 : 0;
}
