// Plain values of a call, and the exceptions of a status.
#pragma once

#include "array.h"

namespace gdn::python {

int64_t to_int64(const char* name, nb::handle object);  // anything with __index__ except bool
int32_t to_int32(const char* name, nb::handle object);
uintptr_t to_address(const char* name, nb::handle object);
bool to_bool(const char* name, nb::handle object);
double to_double(const char* name, nb::handle object);
const char* to_text(const char* name, nb::handle object);  // null for None
const char* to_backend(nb::handle object);                 // null for "auto"
bool is_batch_invariant(nb::handle deterministic);

// Raises the Python exception of a status with the library's text.
void check_status(gdn_status_t status);

}  // namespace gdn::python
