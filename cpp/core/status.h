// Errors of the library: thrown inside, turned into a status and a thread-local text at the C edge.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>

#include "gdn_paged/gdn_paged.h"

namespace gdn {

// An error with its cause. The text lives in the object, so raising one allocates nothing.
class Error : public std::exception {
 public:
  [[gnu::format(printf, 3, 4)]] Error(gdn_status_t status, const char* format, ...)
      : status_(status) {
    va_list args;
    va_start(args, format);
    (void)std::vsnprintf(text_, sizeof text_, format, args);  // a longer text is cut
    va_end(args);
  }
  gdn_status_t status() const { return status_; }
  const char* what() const noexcept override { return text_; }

 private:
  gdn_status_t status_;
  char text_[2048];
};

// The calling thread's last error text (core/api.cpp owns the storage).
void set_last_error(const char* text) noexcept;

// Runs `body` and turns whatever it throws into a status.
template <class Body>
gdn_status_t fence(Body&& body) noexcept {
  try {
    set_last_error("");
    body();
    return GDN_OK;
  } catch (const Error& e) {
    set_last_error(e.what());
    return e.status();
  } catch (const std::bad_alloc&) {
    set_last_error("out of host memory");
    return GDN_INTERNAL;
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return GDN_INTERNAL;
  } catch (...) {
    set_last_error("unknown exception");
    return GDN_INTERNAL;
  }
}

}  // namespace gdn

// One rule, one line: the message names the argument, what came and what is expected.
#define GDN_REQUIRE(condition, ...)                                          \
  do {                                                                       \
    if (!(condition)) throw ::gdn::Error(GDN_INVALID_ARGUMENT, __VA_ARGS__); \
  } while (0)
