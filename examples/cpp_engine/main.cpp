// An inference engine on gdn_paged in C++: requests that share a system prefix run through page
// allocation, a prefix tree, batched chunked prefill and continuous-batching decode, once with and
// once without reuse of the shared pages. Both ways must give the same result; the exit code says
// so. Start reading at Engine::run; the library's calls are in layers.cpp.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include "engine.h"

namespace {

struct Options {
  std::string device = "cpu";
  std::string text;
  int num_new = 24;
  EngineOptions engine;
};

const char kUsage[] =
    "usage: cpp_engine [--device cpu|cuda] [--text FILE] [--new-tokens N] [--page-size N]\n"
    "                  [--pages N]\n"
    "FILE: what stands before a line `---` is the prefix that all requests share, every\n"
    "paragraph after it is a request. Default: a short text of our own.\n";

std::string default_text() {
  std::string text;
  for (int stop = 1; stop <= 20; ++stop) {
    text += "Stop " + std::to_string(stop) + " of the night tram is reached after " +
            std::to_string(4 * stop) + " minutes; ask the driver for the lamp.\n";
  }
  text += "---\n";
  for (const char* place : {"harbour", "bakery", "old bridge", "botanic garden", "observatory"}) {
    text += std::string("How long is the ride to the ") + place + ", and who has the lamp?\n\n";
  }
  return text + "When does the last tram leave?\n";
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || i + 1 == argc) throw std::invalid_argument(kUsage);
    const std::string value = argv[++i];
    if (name == "--device") {
      options.device = value;
    } else if (name == "--text") {
      options.text = value;
    } else if (name == "--new-tokens") {
      options.num_new = std::stoi(value);
    } else if (name == "--page-size") {
      options.engine.page_size = std::stoi(value);
    } else if (name == "--pages") {
      options.engine.num_pages = std::stoi(value);
    } else {
      throw std::invalid_argument(kUsage);
    }
  }
  const bool positive =
      options.num_new > 0 && options.engine.page_size > 0 && options.engine.num_pages > 0;
  if (!positive) throw std::invalid_argument("every number must be positive\n");
  return options;
}

std::vector<Request> read_requests(const Options& options) {
  std::string text = default_text();
  if (!options.text.empty()) {
    std::ifstream file(options.text, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + options.text);
    text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const std::string separator = "\n---\n";
  const size_t cut = text.find(separator);
  if (cut == std::string::npos) throw std::runtime_error("the text has no line `---`");
  const std::string prefix = text.substr(0, cut + 1);
  std::vector<Request> requests;
  std::string line, paragraph;
  std::istringstream lines(text.substr(cut + separator.size()) + "\n\n");
  while (std::getline(lines, line)) {
    if (!line.empty()) {
      paragraph += line + "\n";
    } else if (!paragraph.empty()) {
      Request request;
      request.prompt = prefix + paragraph;
      request.num_new = options.num_new;
      requests.push_back(std::move(request));
      paragraph.clear();
    }
  }
  if (requests.empty()) throw std::runtime_error("the text has no paragraph after its line `---`");
  return requests;
}

// Relative L2 distance of the scores right after the prompt, the worst of all requests.
double prompt_error(const std::vector<Request>& plain, const std::vector<Request>& shared) {
  double worst = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    double difference = 0, norm = 0;
    for (size_t j = 0; j < 256; ++j) {
      const double expected = plain[i].scores[0][j];
      difference += std::pow(shared[i].scores[0][j] - expected, 2);
      norm += expected * expected;
    }
    const double error = std::sqrt(difference / norm);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

int compare(const std::vector<Request>& plain, const std::vector<Request>& shared, bool exact) {
  size_t identical = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    identical += plain[i].generated == shared[i].generated && plain[i].scores == shared[i].scores;
  }
  const double error = prompt_error(plain, shared);
  std::printf(
      "same result    %zu of %zu requests to the last bit, scores after the prompt to %.1e\n",
      identical, plain.size(), error);
  // bf16 operands of the matrix units may round a resumed sequence differently.
  const bool same = exact ? identical == plain.size() : error <= 2e-2;
  if (!same) std::fprintf(stderr, "cpp_engine: reuse of pages changed a result\n");
  return same ? 0 : 1;
}

int run(const Options& options) {
  const std::unique_ptr<Memory> memory = make_memory(options.device);
  const Model model;
  std::printf("library        %s\n", gdn_build_info());
  std::vector<Request> results[2];
  for (const bool reuse : {false, true}) {
    std::vector<Request>& requests = results[reuse];
    requests = read_requests(options);
    EngineOptions engine_options = options.engine;
    engine_options.reuse = reuse;
    Engine engine(model, *memory, engine_options);
    const auto start = std::chrono::steady_clock::now();
    engine.run(&requests);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    size_t tokens = 0, reused = 0, prompts = 0;
    for (const Request& request : requests) {
      prompts += request.prompt.size();
      tokens += request.prompt.size() + request.generated.size();
      reused += request.num_reused;
    }
    std::printf("%-14s %.0f tokens/s, %zu of %zu prompt tokens from cached pages\n",
                reuse ? "with reuse" : "without reuse", tokens / seconds.count(), reused, prompts);
    if (reuse) {
      std::printf("prefill row    %s\ndecode row     %s\n", engine.layers().prefill_row().c_str(),
                  engine.layers().decode_row().c_str());
    }
  }
  return compare(results[0], results[1], memory->device() == GDN_CPU);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_engine: %s\n", error.what());
    return 2;
  }
}
