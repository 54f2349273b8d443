// Continuous batching: chunked prefill and decode of many requests over one set of pages.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "layers.h"

// One prompt and what became of it.
struct Request {
  std::string prompt;
  int num_new = 0;
  std::vector<int> pages;
  int num_reused = 0;  // tokens taken from cached pages
  int num_done = 0;    // tokens whose state is in the pools
  std::string generated;
  std::vector<std::vector<float>> scores;  // one [256] per generated token

  bool prompt_done() const { return num_done >= static_cast<int>(prompt.size()); }
  bool finished() const { return static_cast<int>(generated.size()) == num_new; }
  void sample(std::vector<float> next);  // greedy
};

struct EngineOptions {
  int num_pages = 256;
  int page_size = 64;
  int max_running = 8;
  int prefill_budget = 512;  // prompt tokens per step
  bool reuse = true;
};

class Engine {
 public:
  Engine(const Model& model, Memory& memory, const EngineOptions& options);

  // Serves all requests, in steps of one prefill batch and one decode batch.
  void run(std::vector<Request>* requests);

  const Layers& layers() const { return layers_; }

 private:
  using Chunk = std::pair<Request*, int>;  // a request and how many prompt tokens of it

  int pages_of(int tokens) const { return (tokens + options_.page_size - 1) / options_.page_size; }
  Request* admit();
  std::vector<Chunk> next_chunks();
  void prefill();
  void decode();
  void retire();
  Batch table(const std::vector<Request*>& requests) const;

  const Model& model_;
  EngineOptions options_;
  Layers layers_;
  PageAllocator allocator_;
  PrefixTree tree_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;
};
