/* OpenMP's parallel loops on plain threads, for ThreadSanitizer: it cannot see libgomp's own
 * synchronisation and would report every fork and join as a race. Preload it before libgomp.
 *
 *     gcc -shared -fPIC -fsanitize=thread -O1 openmp_for_tsan.c -o libopenmp_for_tsan.so
 *
 * Covers what `#pragma omp parallel for schedule(dynamic)` compiles to, one loop per region. */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum { kMaxThreads = 64, kDefaultThreads = 4 };

typedef struct team {
  void (*body)(void*);
  void* data;
  pthread_mutex_t lock;
  bool loop_started;
  long next, end, step;
} team_t;

static _Thread_local team_t* current;

int omp_get_max_threads(void) { return kDefaultThreads; }
int omp_in_parallel(void) { return current != NULL; }
void GOMP_loop_end_nowait(void) {}

static void* work(void* argument) {
  current = argument;
  current->body(current->data);
  current = NULL;
  return NULL;
}

void GOMP_parallel(void (*body)(void*), void* data, unsigned count, unsigned flags) {
  (void)flags;
  team_t team = {.body = body, .data = data, .lock = PTHREAD_MUTEX_INITIALIZER};
  pthread_t threads[kMaxThreads];
  if (count == 0) count = kDefaultThreads;
  if (count > kMaxThreads) count = kMaxThreads;
  unsigned started = 0;
  while (started + 1 < count && !pthread_create(&threads[started], NULL, work, &team)) ++started;
  work(&team);
  for (unsigned i = 0; i < started; ++i) pthread_join(threads[i], NULL);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) {
  team_t* team = current;
  pthread_mutex_lock(&team->lock);
  const bool any = team->next < team->end;
  if (any) {
    *first = team->next;
    *last = team->next + team->step < team->end ? team->next + team->step : team->end;
    team->next = *last;
  }
  pthread_mutex_unlock(&team->lock);
  return any;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long increment, long chunk,
                                          long* first, long* last) {
  team_t* team = current;
  pthread_mutex_lock(&team->lock);
  if (!team->loop_started) {
    team->loop_started = true;
    team->next = start;
    team->end = end;
    team->step = increment * chunk;
  }
  pthread_mutex_unlock(&team->lock);
  return GOMP_loop_nonmonotonic_dynamic_next(first, last);
}
