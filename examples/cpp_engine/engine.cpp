#include "engine.h"

#include <algorithm>
#include <stdexcept>

void Request::sample(std::vector<float> next) {
  const auto best = std::max_element(next.begin(), next.end());
  generated.push_back(static_cast<char>(best - next.begin()));
  scores.push_back(std::move(next));
}

Engine::Engine(const Model& model, Memory& memory, const EngineOptions& options)
    : model_(model), options_(options),
      layers_(model, memory, options.num_pages, options.page_size), allocator_(options.num_pages),
      tree_(allocator_, options.page_size) {}

void Engine::run(std::vector<Request>* requests) {
  for (Request& request : *requests) waiting_.push_back(&request);
  while (!waiting_.empty() || !running_.empty()) {
    prefill();
    decode();
    retire();
  }
}

// Starts the next waiting request, if all pages it will ever need can be had.
Request* Engine::admit() {
  if (waiting_.empty() || static_cast<int>(running_.size()) >= options_.max_running) return nullptr;
  Request* request = waiting_.front();
  // The last generated token is never fed back, so its state needs no room.
  const int needed = pages_of(static_cast<int>(request->prompt.size()) + request->num_new - 1);
  // At least one prompt token must run, to have something to predict from.
  const std::string cacheable = request->prompt.substr(0, request->prompt.size() - 1);
  std::vector<int> pages;
  if (options_.reuse) pages = tree_.match(cacheable);
  const int missing = needed - static_cast<int>(pages.size());
  if (!tree_.evict(missing)) {
    for (const int page : pages) allocator_.release(page);
    if (running_.empty()) {
      throw std::runtime_error("a request needs " + std::to_string(needed) +
                               " pages, the pool has " + std::to_string(options_.num_pages));
    }
    return nullptr;
  }
  waiting_.pop_front();
  request->num_reused = request->num_done = static_cast<int>(pages.size()) * options_.page_size;
  for (int i = 0; i < missing; ++i) pages.push_back(allocator_.allocate());
  request->pages = std::move(pages);
  running_.push_back(request);
  return request;
}

// Prompt chunks of one step. A prompt is cut at page ends only: the CPU rows promise the same
// bytes for a sequence cut there and for one that is not.
std::vector<Engine::Chunk> Engine::next_chunks() {
  std::vector<Chunk> chunks;
  int budget = std::max(options_.prefill_budget / options_.page_size, 1) * options_.page_size;
  std::deque<Request*> unfinished;
  for (Request* request : running_) {
    if (!request->prompt_done()) unfinished.push_back(request);
  }
  while (budget >= options_.page_size) {
    Request* request = nullptr;
    if (!unfinished.empty()) {
      request = unfinished.front();
      unfinished.pop_front();
    } else {
      request = admit();  // only when its first chunk runs, so that it sees the newest tree
    }
    if (!request) break;
    const int left = static_cast<int>(request->prompt.size()) - request->num_done;
    const int length = std::min(left, budget);
    chunks.emplace_back(request, length);
    budget -= pages_of(length) * options_.page_size;
  }
  return chunks;
}

void Engine::prefill() {
  const std::vector<Chunk> chunks = next_chunks();
  if (chunks.empty()) return;
  std::string tokens;
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<Request*> requests;
  for (const auto& [request, length] : chunks) {
    tokens += request->prompt.substr(request->num_done, length);
    cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
    request->num_done += length;
    requests.push_back(request);
  }
  Batch batch = table(requests);
  batch.tokens = std::move(tokens);
  batch.cu_seqlens = cu_seqlens;
  const std::vector<float> hidden = layers_.forward(batch);
  for (size_t i = 0; i < requests.size(); ++i) {
    Request* request = requests[i];
    if (request->prompt_done()) {
      request->sample(model_.scores(&hidden[(cu_seqlens[i + 1] - 1) * Model::kWidth]));
    }
    if (options_.reuse) tree_.insert(request->prompt.substr(0, request->num_done), request->pages);
  }
}

// One token of every request whose prompt is done.
void Engine::decode() {
  std::vector<Request*> rows;
  std::string tokens;
  for (Request* request : running_) {
    if (request->generated.empty() || request->finished()) continue;
    tokens.push_back(request->generated.back());
    ++request->num_done;
    rows.push_back(request);
  }
  if (rows.empty()) return;
  Batch batch = table(rows);
  batch.tokens = std::move(tokens);
  const std::vector<float> hidden = layers_.forward(batch);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i]->sample(model_.scores(&hidden[i * Model::kWidth]));
  }
}

void Engine::retire() {
  const auto done = std::stable_partition(running_.begin(), running_.end(),
                                          [](const Request* r) { return !r->finished(); });
  for (auto it = done; it != running_.end(); ++it) {
    for (const int page : (*it)->pages) allocator_.release(page);
  }
  running_.erase(done, running_.end());
}

// The page table of requests whose num_done counts the new tokens already.
Batch Engine::table(const std::vector<Request*>& requests) const {
  Batch batch;
  batch.page_indptr.push_back(0);
  for (const Request* request : requests) {
    const int count = pages_of(request->num_done);
    batch.page_indices.insert(batch.page_indices.end(), request->pages.begin(),
                              request->pages.begin() + count);
    batch.page_indptr.push_back(static_cast<int32_t>(batch.page_indices.size()));
    batch.last_page_len.push_back(request->num_done - (count - 1) * options_.page_size);
  }
  return batch;
}
