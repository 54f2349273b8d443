#include "layers.h"

#include <stdexcept>

namespace {

void check(gdn_status_t status, const char* call) {
  if (status == GDN_OK) return;
  throw std::runtime_error(std::string(call) + ": " + gdn_status_string(status) + ": " +
                           gdn_last_error());
}

std::string explain(gdn_op_t op, const void* params) {
  std::string text(4096, '\0');
  check(gdn_explain(op, params, text.data(), text.size(), nullptr), "gdn_explain");
  text.resize(text.find_first_of(std::string("\n\0", 2)));  // the row that serves
  return text;
}

}  // namespace

Layers::Layers(const Model& model, Memory& memory, int64_t num_pages, int64_t page_size)
    : memory_(memory), num_pages_(num_pages), page_size_(page_size), cu_seqlens_(memory),
      page_indices_(memory), page_indptr_(memory), last_page_len_(memory), read_rows_(memory),
      write_rows_(memory), checkpoint_starts_(memory), prefix_lens_(memory), qkv_(memory),
      a_(memory), b_(memory), output_(memory), workspace_(memory), plan_(memory) {
  if (memory.device() == GDN_CUDA_DEVICE) check(gdn_preload(0), "gdn_preload");
  for (const Model::Layer& weights : model.layers) {
    Layer layer{&weights, std::make_unique<Buffer>(memory), std::make_unique<Buffer>(memory),
                std::make_unique<Buffer>(memory)};
    const size_t bytes = num_pages * Model::kStateElements * sizeof(float);
    memory.zero(layer.pool->reserve(bytes), bytes);
    layer.A_log->upload(weights.A_log);
    layer.dt_bias->upload(weights.dt_bias);
    layers_.push_back(std::move(layer));
  }
}

std::vector<float> Layers::forward(const Batch& batch) {
  // Table, slots and plan depend on the batch alone: once per step, for all layers.
  const gdn_page_table_params_t table = upload_table(batch);
  gdn_prefill_params_t params = GDN_PREFILL_PARAMS_INIT;
  if (batch.is_decode()) {
    check(gdn_decode_slots(&table), "gdn_decode_slots");
  } else {
    check(gdn_prefill_slots(&table), "gdn_prefill_slots");
    prepare_prefill(batch, &params);
  }
  const size_t num_outputs = batch.tokens.size() * Model::kWidth;
  std::vector<float> sum(num_outputs, 0.0f);
  std::vector<bfloat16> output(num_outputs);
  for (const Layer& layer : layers_) {
    upload_inputs(*layer.weights, batch.tokens);
    if (batch.is_decode()) {
      decode(layer, table);
    } else {
      prefill(layer, &params);
    }
    output_.download(&output);
    for (size_t i = 0; i < num_outputs; ++i) sum[i] += to_float(output[i]);
  }
  return sum;
}

gdn_page_table_params_t Layers::upload_table(const Batch& batch) {
  const size_t bytes = batch.num_seqs() * sizeof(int32_t);
  gdn_page_table_params_t table = GDN_PAGE_TABLE_PARAMS_INIT;
  table.device_type = memory_.device();
  table.num_seqs = batch.num_seqs();
  table.num_tokens = static_cast<int64_t>(batch.tokens.size());
  table.num_indices = static_cast<int64_t>(batch.page_indices.size());
  table.num_pages = num_pages_;
  table.page_size = page_size_;
  table.page_indices = page_indices_.upload(batch.page_indices);
  table.page_indptr = page_indptr_.upload(batch.page_indptr);
  table.last_page_len = last_page_len_.upload(batch.last_page_len);
  table.state_indices = static_cast<int32_t*>(read_rows_.reserve(bytes));
  table.output_state_indices = static_cast<int32_t*>(write_rows_.reserve(bytes));
  if (!batch.is_decode()) {
    table.cu_seqlens = cu_seqlens_.upload(batch.cu_seqlens);
    table.checkpoint_cu_starts = static_cast<int32_t*>(checkpoint_starts_.reserve(bytes));
    table.prefix_lens = static_cast<int32_t*>(prefix_lens_.reserve(bytes));
  }
  return table;
}

void Layers::upload_inputs(const Model::Layer& layer, const std::string& tokens) {
  std::vector<bfloat16> qkv;
  std::vector<float> a, b;
  for (const unsigned char token : tokens) {
    const auto row = layer.qkv.begin() + token * Model::kColumns;
    qkv.insert(qkv.end(), row, row + Model::kColumns);
    for (int head = 0; head < Model::kHeads; ++head) {
      a.push_back(layer.a[token * Model::kHeads + head]);
      b.push_back(layer.b[token * Model::kHeads + head]);
    }
  }
  qkv_.upload(qkv);
  a_.upload(a);
  b_.upload(b);
  output_.reserve(tokens.size() * Model::kWidth * sizeof(bfloat16));
}

void Layers::prepare_prefill(const Batch& batch, gdn_prefill_params_t* p) {
  const size_t tokens = batch.tokens.size();
  p->device_type = memory_.device();
  p->flags = GDN_QK_L2NORM | GDN_BETA_IS_LOGIT;
  p->num_seqs = batch.num_seqs();
  p->num_tokens = static_cast<int64_t>(tokens);
  p->num_q_heads = p->num_k_heads = Model::kQkHeads;
  p->num_v_heads = Model::kHeads;
  p->head_dim_k = p->head_dim_v = Model::kDim;
  p->io_dtype = GDN_BFLOAT16;
  // q, k and v are columns of one projection, as in a fused product: strides instead of copies.
  const auto* qkv = static_cast<bfloat16*>(qkv_.reserve(tokens * Model::kColumns * 2));
  p->q = qkv;
  p->k = qkv + Model::kQkWidth;
  p->v = qkv + 2 * Model::kQkWidth;
  p->q_token_stride = p->k_token_stride = p->v_token_stride = Model::kColumns;
  p->g = a_.reserve(tokens * Model::kHeads * sizeof(float));
  p->beta = b_.reserve(tokens * Model::kHeads * sizeof(float));
  p->output = output_.reserve(tokens * Model::kWidth * sizeof(bfloat16));
  p->gate = GDN_GATE_RAW;
  p->cu_seqlens = cu_seqlens_.data();
  p->page_indices = page_indices_.data();
  p->page_indptr = page_indptr_.data();
  p->last_page_len = last_page_len_.data();
  p->num_indices = static_cast<int64_t>(batch.page_indices.size());
  p->page_size = page_size_;
  p->state_indices = read_rows_.data();
  p->output_state_indices = write_rows_.data();
  p->checkpoint_cu_starts = checkpoint_starts_.data();
  p->prefix_lens = prefix_lens_.data();
}

void Layers::prefill(const Layer& layer, gdn_prefill_params_t* p) {
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = layer.pool->data();
  pool.num_rows = num_pages_;
  p->state_pool = &pool;
  p->A_log = layer.A_log->data();
  p->dt_bias = layer.dt_bias->data();
  if (&layer == &layers_.front()) {
    check(gdn_prefill_workspace_size(p, &p->workspace_bytes), "gdn_prefill_workspace_size");
    check(gdn_prefill_plan_size(p, &p->plan_bytes), "gdn_prefill_plan_size");
    p->workspace = p->workspace_bytes > 0 ? workspace_.reserve(p->workspace_bytes) : nullptr;
    p->plan = p->plan_bytes > 0 ? plan_.reserve(p->plan_bytes) : nullptr;
    check(gdn_prefill_plan(p), "gdn_prefill_plan");
    if (prefill_row_.empty()) prefill_row_ = explain(GDN_OP_PREFILL_PAGED, p);
  }
  check(gdn_prefill_paged(p), "gdn_prefill_paged");
}

void Layers::decode(const Layer& layer, const gdn_page_table_params_t& table) {
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = layer.pool->data();
  pool.num_rows = num_pages_;
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  p.device_type = memory_.device();
  p.flags = GDN_QK_L2NORM;
  p.batch_size = table.num_seqs;
  p.num_q_heads = p.num_k_heads = Model::kQkHeads;
  p.num_v_heads = Model::kHeads;
  p.head_dim_k = p.head_dim_v = Model::kDim;
  p.io_dtype = GDN_BFLOAT16;
  const auto* qkv = static_cast<bfloat16*>(qkv_.data());
  p.q = qkv;
  p.k = qkv + Model::kQkWidth;
  p.v = qkv + 2 * Model::kQkWidth;
  p.output = output_.data();
  p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = Model::kColumns;
  p.a = a_.data();
  p.b = b_.data();
  p.A_log = layer.A_log->data();
  p.dt_bias = layer.dt_bias->data();
  p.state_pool = &pool;
  p.page_indices = table.page_indices;
  p.page_indptr = table.page_indptr;
  p.last_page_len = table.last_page_len;
  p.num_indices = table.num_indices;
  p.initial_state_indices = table.state_indices;
  p.output_state_indices = table.output_state_indices;
  if (decode_row_.empty()) decode_row_ = explain(GDN_OP_DECODE_PAGED, &p);
  check(gdn_decode_paged(&p), "gdn_decode_paged");
}
