// The extension module gdn_paged._core: the C API for Python arrays. Every function of the hot
// path takes one tuple, packed by python/gdn_paged in the order of the enums beside it.
#include "call.h"

namespace gdn::python {
namespace {

// (operation, row name, description) in the order of preference.
nb::list kernel_rows() {
  static const struct {
    gdn_op_t op;
    const char* name;
  } kOps[] = {{GDN_OP_PREFILL_PAGED, "prefill_paged"}, {GDN_OP_PREFILL, "prefill"},
              {GDN_OP_DECODE_PAGED, "decode_paged"},   {GDN_OP_DECODE, "decode"},
              {GDN_OP_VERIFY_PAGED, "verify_paged"},   {GDN_OP_SEGMENT, "segment"}};
  nb::list rows;
  for (const auto& op : kOps) {
    for (int32_t i = 0; const char* name = gdn_kernel_row_name(op.op, i); ++i) {
      rows.append(nb::make_tuple(op.name, name, gdn_kernel_row_description(op.op, i)));
    }
  }
  return rows;
}

void preload(int32_t device) {
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_preload(device);
  }
  check_status(status);
}

}  // namespace
}  // namespace gdn::python

NB_MODULE(_core, m) {
  using namespace gdn::python;
  m.doc() = "The C API of libgdn_paged for Python arrays; gdn_paged holds the public functions.";
  nb::exception<UnbackedTensor>(m, "UnbackedTensorError", PyExc_ValueError);
  define_prefill(m);
  define_decode(m);
  define_slots(m);
  define_verify(m);
  define_segment(m);
  m.def("kernel_rows", &kernel_rows);
  m.def("preload", &preload, nb::arg("device"));
  m.def("version", [] { return gdn_version(); });
  m.def("build_info", [] { return nb::str(gdn_build_info()); });
#if defined(GDN_WITH_CUDA)
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}
