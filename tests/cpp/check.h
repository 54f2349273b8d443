/* Assertions of the test executables: a failed one prints its place and the test ends with 1. */
#ifndef GDN_TESTS_CHECK_H_
#define GDN_TESTS_CHECK_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

#define CHECK_EQUAL(got, expected)                                                          \
  do {                                                                                      \
    const long long got_ = (long long)(got), expected_ = (long long)(expected);             \
    if (got_ != expected_) {                                                                \
      fprintf(stderr, "%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #got, got_, \
              expected_);                                                                   \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

/* `text` contains `part`. */
#define CHECK_CONTAINS(text, part)                                                        \
  do {                                                                                    \
    const char* text_ = (text);                                                           \
    if (strstr(text_, (part)) == NULL) {                                                  \
      fprintf(stderr, "%s:%d: \"%s\" lacks \"%s\"\n", __FILE__, __LINE__, text_, (part)); \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)

/* A call that must succeed. */
#define CHECK_OK(call)                                                                   \
  do {                                                                                   \
    const gdn_status_t status_ = (call);                                                 \
    if (status_ != GDN_OK) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, gdn_status_string(status_), \
              gdn_last_error());                                                         \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

#endif /* GDN_TESTS_CHECK_H_ */
