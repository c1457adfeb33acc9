// classify MODEL.aoti.pt2 IMAGE...: print file, class and probability, one line per image. If images have several labels,
// print those that reach their thresholds, with semicolons between them, and the highest probability.
// classify --pixels MODEL.aoti.pt2 IMAGE...: print the model input instead, as hexadecimal bytes.
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <sstream>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include "image.h"

namespace {

// Metadata in the package.
struct Metadata {
  std::vector<std::string> classes;
  std::vector<double> thresholds;  // empty if an image has one class
  int height = 0, width = 0, channels = 0;
  std::string fit;
  double crop = 1;
};

// Packages are zip archives. torch reports any other file with a stack trace.
void require_package(const char* path) {
  char head[4] = {};
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open; check the path");
  file.read(head, sizeof head);
  if (std::memcmp(head, "PK\3\4", sizeof head))
    throw std::runtime_error("not a model package; write one with `convolve export RUN --format aoti`");
}

// The first line of an error; torch appends a stack trace to its messages.
std::string describe(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text = from_torch ? from_torch->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

Metadata read_metadata(torch::inductor::AOTIModelPackageLoader& package) {
  auto strings = package.get_metadata();
  Metadata metadata;
  std::istringstream names(strings["classes"]), shape(strings["shape"]);
  for (std::string name; std::getline(names, name);) metadata.classes.push_back(name);
  std::istringstream thresholds(strings["thresholds"]);
  for (double value; thresholds >> value;) metadata.thresholds.push_back(value);
  if (!metadata.thresholds.empty() && metadata.thresholds.size() != metadata.classes.size())
    throw std::runtime_error("as many thresholds as labels are needed; export the run again");
  shape >> metadata.height >> metadata.width >> metadata.channels;
  metadata.fit = strings["fit"];
  std::istringstream(strings["crop"]) >> metadata.crop;
  if (metadata.classes.empty() || metadata.height < 1) throw std::runtime_error("no convolve metadata in the package");
  return metadata;
}

Image prepare(const std::string& path, const Metadata& metadata) {
  const Image image = read_image(path, metadata.channels);
  if (metadata.fit == "digit") return fit_digit(image, metadata.height);
  return fit_photo(image, metadata.height, metadata.width, metadata.crop);
}

void print_class(torch::inductor::AOTIModelPackageLoader& package, const Metadata& metadata, const char* path,
                 Image input) {
  auto pixels =
      torch::from_blob(input.pixels.data(), {1, metadata.height, metadata.width, metadata.channels}, torch::kUInt8);
  const auto logits = package.run({pixels})[0];
  const bool several = !metadata.thresholds.empty();
  const auto probabilities = (several ? logits.sigmoid() : logits.softmax(1))[0];
  const auto best = probabilities.argmax().item<int64_t>();
  std::string found = several ? "" : metadata.classes[best];
  for (size_t label = 0; label < metadata.thresholds.size(); ++label)
    if (probabilities[label].item<float>() >= metadata.thresholds[label])
      found += (found.empty() ? "" : ";") + metadata.classes[label];
  std::printf("%s\t%s\t%.6f\n", path, found.c_str(), probabilities[best].item<float>());
}

}  // namespace

int main(int argc, char** argv) {
  const bool only_pixels = argc > 1 && !std::strcmp(argv[1], "--pixels");
  const int first = only_pixels ? 2 : 1;
  if (argc < first + 2) {
    std::fprintf(stderr, "usage: classify [--pixels] MODEL.aoti.pt2 IMAGE...\n");
    return 2;
  }
  c10::InferenceMode inference;
  int failures = 0;
  try {
    require_package(argv[first]);
    torch::inductor::AOTIModelPackageLoader package(argv[first]);
    const Metadata metadata = read_metadata(package);
    for (int index = first + 1; index < argc; ++index) try {
        Image input = prepare(argv[index], metadata);
        if (!only_pixels) {
          print_class(package, metadata, argv[index], std::move(input));
          continue;
        }
        std::printf("%s\t", argv[index]);
        for (uint8_t value : input.pixels) std::printf("%02x", value);
        std::printf("\n");
      } catch (const std::exception& error) {
        std::fprintf(stderr, "classify: %s: %s\n", argv[index], describe(error).c_str());
        ++failures;
      }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "classify: %s: %s\n", argv[first], describe(error).c_str());
    return 1;
  }
  return failures ? 1 : 0;
}
