// The layers of the model on one device: state pools, buffers and the calls of gdn_paged.
#pragma once

#include <gdn_paged/gdn_paged.h>

#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "model.h"

// The new tokens of one step and the page table that holds them.
struct Batch {
  std::string tokens;                  // of all sequences, one after the other
  std::vector<int32_t> cu_seqlens;     // [num_seqs + 1]; empty in a decode step
  std::vector<int32_t> page_indices;   // [num_indices]
  std::vector<int32_t> page_indptr;    // [num_seqs + 1]
  std::vector<int32_t> last_page_len;  // [num_seqs]

  bool is_decode() const { return cu_seqlens.empty(); }
  int64_t num_seqs() const { return static_cast<int64_t>(last_page_len.size()); }
};

class Layers {
 public:
  Layers(const Model& model, Memory& memory, int64_t num_pages, int64_t page_size);

  // Runs the new tokens through every layer, updating the pools, and returns the summed outputs
  // [num_tokens, Model::kWidth]. Throws std::runtime_error with the library's text.
  std::vector<float> forward(const Batch& batch);

  // What gdn_explain says about the row that served the last prefill or decode.
  const std::string& prefill_row() const { return prefill_row_; }
  const std::string& decode_row() const { return decode_row_; }

 private:
  struct Layer {
    const Model::Layer* weights;
    std::unique_ptr<Buffer> pool, A_log, dt_bias;
  };

  gdn_page_table_params_t upload_table(const Batch& batch);
  void upload_inputs(const Model::Layer& layer, const std::string& tokens);
  void prepare_prefill(const Batch& batch, gdn_prefill_params_t* params);
  void prefill(const Layer& layer, gdn_prefill_params_t* params);
  void decode(const Layer& layer, const gdn_page_table_params_t& table);

  Memory& memory_;
  int64_t num_pages_;
  int64_t page_size_;
  std::vector<Layer> layers_;
  Buffer cu_seqlens_, page_indices_, page_indptr_, last_page_len_;
  Buffer read_rows_, write_rows_, checkpoint_starts_, prefix_lens_;
  Buffer qkv_, a_, b_, output_, workspace_, plan_;
  std::string prefill_row_, decode_row_;
};
