// Streams as queues, events, the virtual clocks, and the log of what happened.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "device.h"

static constexpr double CALL_S = 2e-6;  // by which each call that enqueues moves the host's clock

struct Stream;
struct Event {
  long number = 0;
  double time = 0;
  long recorded = 0;  // how often it was recorded
  long passed = 0;    // the last of these that its stream has reached
  Stream* on = nullptr;
  unsigned long long capture = 0;  // during which it was recorded
  std::map<Stream*, long> seen;    // what of that capture comes before it, see Capture
};
struct Work {
  std::function<void()> run;
  std::shared_ptr<Event> records, waits;
  long version = 0;      // of `records` or `waits`
  Stream* on = nullptr;  // of `waits`: where it was recorded
};
struct Stream {
  int number = 0, priority = 0;
  double time = 0;
  double busy_s = 0;  // all its work together
  std::deque<Work> queue;
  bool is_busy = false;  // its first piece of work runs now
};

static std::mutex mutex;
static std::condition_variable changed;
static Stream legacy;
static std::vector<Stream*> streams{&legacy};
static long num_events = 0;
static double host_time = 0;
static bool runs_late = false;
static double chance = 0;  // LATE: that a call makes some stream go on
static std::mt19937 dice;
static std::atomic<double> seconds_of_a_kernel{KERNEL_S}, speed_of_the_link{PINNED_BYTES_PER_S};

// What a CUDA graph does: work, events and waits of several streams, in the order of their calls.
struct Node {
  Stream* stream;
  Logged logged;
  bool is_work = false;
  double seconds = 0;
  std::function<void()> run;
  std::shared_ptr<Event> records, waits;
};
struct Graph {
  Stream* origin = nullptr;
  std::vector<Node> nodes;
};
struct Capture : Graph {
  unsigned long long number = 0;
  bool is_invalid = false;  // something forbidden happened
  // Per stream that takes part: how many pieces of each stream's work come before its next one.
  std::map<Stream*, std::map<Stream*, long>> seen;
};
static std::unique_ptr<Capture> captured;
static unsigned long long num_captures = 0;
static std::atomic<long> num_graph_launches{0};

cudaError_t forbid(cudaError_t error) {
  if (captured) captured->is_invalid = true;
  return fail(error);
}
static bool takes_part(Stream& one) {
  return captured && captured->seen.count(&one);
}
static void join(std::map<Stream*, long>& into, const std::map<Stream*, long>& from) {
  for (auto& [stream, number] : from) into[stream] = std::max(into[stream], number);
}

double kernel_s() {
  return seconds_of_a_kernel;
}
double pinned_bytes_per_s() {
  return speed_of_the_link;
}

// This thread runs a piece of work. Python's collector may free memory of the device in it, and
// cudaFree must not wait for the work itself.
static thread_local bool is_at_work = false;

static Stream& at(void* stream) {
  bool is_default = stream == nullptr || stream == (void*)1 || stream == (void*)2;
  return is_default ? legacy : *(Stream*)stream;
}
int number_of(void* stream) {
  return at(stream).number;
}
bool is_captured(void* stream) {
  return takes_part(at(stream));
}

// ---- running what is queued
using Hold = std::unique_lock<std::mutex>;
static void run_first(Hold& hold, Stream& stream);
static void run_until(Hold& hold, Stream& stream, const std::function<bool()>& is_enough) {
  while (!is_enough() && (stream.is_busy || !stream.queue.empty())) {
    if (stream.is_busy)
      changed.wait(hold);
    else
      run_first(hold, stream);
  }
}
static bool is_held_up(const Stream& stream) {
  const Work& first = stream.queue.front();
  return first.waits && first.waits->passed < first.version;
}
// The first piece of work of `stream`, and before it whatever it waits for on other streams.
static void run_first(Hold& hold, Stream& stream) {
  stream.is_busy = true;
  Work& first = stream.queue.front();
  if (is_held_up(stream))
    run_until(hold, *first.on, [&] { return first.waits->passed >= first.version; });
  if (first.run) {
    hold.unlock();
    is_at_work = true;
    first.run();
    is_at_work = false;
    hold.lock();
  }
  if (first.records && first.records->passed < first.version) first.records->passed = first.version;
  stream.queue.pop_front();
  stream.is_busy = false;
  changed.notify_all();
}
static void run_all(Hold& hold, Stream& stream) {
  run_until(hold, stream, [] { return false; });
}
static void go_on_somewhere(Hold& hold) {
  if (std::uniform_real_distribution<>()(dice) >= chance) return;
  std::vector<Stream*> ready;
  for (Stream* one : streams)
    if (!one->is_busy && !one->queue.empty() && !is_held_up(*one)) ready.push_back(one);
  if (!ready.empty()) run_first(hold, *ready[dice() % ready.size()]);
}
static void put(Hold& hold, Stream& stream, Work work) {
  stream.queue.push_back(std::move(work));
  if (runs_late)
    go_on_somewhere(hold);
  else if (!stream.is_busy)  // else its owner goes on with what was put
    run_all(hold, stream);
}
static void put_work(Hold& hold, Stream& one, double seconds, std::function<void()> run) {
  one.time = std::max(one.time, host_time) + seconds;
  one.busy_s += seconds;
  put(hold, one, {std::move(run)});
}
void enqueue(void* stream, double seconds, const Logged& logged, std::function<void()> run) {
  Hold hold(mutex);
  Stream& one = at(stream);
  host_time += CALL_S;
  if (takes_part(one)) {
    captured->seen[&one][&one]++;
    captured->nodes.push_back({&one, logged, true, seconds, std::move(run)});
    return;
  }
  log_did(logged.did, stream, logged.a, logged.b, logged.c);
  put_work(hold, one, seconds, std::move(run));
}
static void enqueue_host_function(void* stream, std::function<void()> run) {
  enqueue(stream, 0, {Did::MARK}, std::move(run));
}
// 0: work runs when it is put into a stream. 1: as late as the host allows, but each call makes
// some stream go on with this chance.
X void memo_device_schedule(int late, double chance_of_progress, unsigned seed) {
  synchronize_all();
  Hold hold(mutex);
  runs_late = late;
  chance = chance_of_progress;
  dice.seed(seed);
}
// A function instead of a kernel: `run(argument)`, in the stream's order.
X void memo_device_call(void* stream, void (*run)(long), long argument) {
  enqueue(stream, kernel_s(), {Did::LAUNCH}, [=] { run(argument); });
}

// ---- the host waits
static void host_waits(Hold& hold, double time) {
  double seconds = time - host_time;
  if (seconds <= 0) return;
  host_time = time;
  hold.unlock();
  usleep((useconds_t)(seconds * 1e6));
  hold.lock();
}
void synchronize(void* stream) {
  Hold hold(mutex);
  log_did(Did::SYNC_STREAM, stream, nullptr, nullptr, 0);
  run_all(hold, at(stream));
  host_waits(hold, at(stream).time);
}
void synchronize_all() {
  Hold hold(mutex);
  log_did(Did::SYNC_ALL, nullptr, nullptr, nullptr, 0);
  if (is_at_work) return;
  double last = 0;
  for (size_t i = 0; i < streams.size(); i++) {
    run_all(hold, *streams[i]);
    last = std::max(last, streams[i]->time);
  }
  host_waits(hold, last);
}
X cudaError_t cudaDeviceSynchronize() {
  if (captured) return forbid(cudaErrorStreamCaptureUnsupported);
  synchronize_all();
  return cudaSuccess;
}
X cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  TRACE("sync stream %d", number_of(stream));
  if (captured) return forbid(cudaErrorStreamCaptureUnsupported);
  synchronize(stream);
  return cudaSuccess;
}
X double memo_device_time() {  // the host's clock, in seconds
  Hold hold(mutex);
  return host_time;
}

// How long each kernel takes from now on, and how fast pinned memory is copied; 0: as at first.
X void memo_device_speeds(double seconds, double bytes_per_s) {
  synchronize_all();
  seconds_of_a_kernel = seconds > 0 ? seconds : KERNEL_S;
  speed_of_the_link = bytes_per_s > 0 ? bytes_per_s : PINNED_BYTES_PER_S;
}
X long memo_device_busy(double* into, long room) {  // per stream, by number; how many there are
  Hold hold(mutex);
  for (long i = 0; into && i < room && i < (long)streams.size(); i++) into[i] = streams[i]->busy_s;
  return (long)streams.size();
}

// ---- streams
X cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int priority) {
  Hold hold(mutex);
  auto* one = new Stream;
  one->priority = priority;
  one->number = (int)streams.size();
  streams.push_back(one);
  *made = (cudaStream_t)one;
  return cudaSuccess;
}
X cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithPriority(made, 0, 0);
}
X cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
X cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Hold hold(mutex);
  Stream& one = at(stream);
  return one.queue.empty() && one.time <= host_time ? cudaSuccess : cudaErrorNotReady;
}
X cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = at(stream).priority;
  return cudaSuccess;
}
X cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t run, void* argument,
                                    unsigned) {
  enqueue_host_function(stream, [=] { run(stream, cudaSuccess, argument); });
  return cudaSuccess;
}
X cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* argument) {
  enqueue_host_function(stream, [=] { run(argument); });
  return cudaSuccess;
}
// ---- CUDA graphs: a capture begins and ends, by CUDA's rules of what may happen meanwhile. A launch
// puts the work into the stream that it is given to, and into streams of its own for those that the
// capture had forked.
struct Launchable {
  Graph graph;
  std::map<Stream*, Stream*> lanes;  // a forked stream -> the one that has its work in a launch
};
static cudaStreamCaptureStatus status_of(void* stream) {
  if (!takes_part(at(stream))) return cudaStreamCaptureStatusNone;
  return captured->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
X cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = status_of(stream);
  return cudaSuccess;
}
X cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                       unsigned long long* id, cudaGraph_t*,
                                       const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                       size_t*) {
  *status = status_of(stream);
  if (id) *id = *status == cudaStreamCaptureStatusNone ? 0 : num_captures;
  return cudaSuccess;
}
X cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
X cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Hold hold(mutex);
  if (captured) return fail(cudaErrorIllegalState);
  captured = std::make_unique<Capture>();
  captured->origin = &at(stream);
  captured->number = ++num_captures;
  captured->seen[captured->origin];
  return cudaSuccess;
}
X cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* made) {
  Hold hold(mutex);
  if (!captured || &at(stream) != captured->origin) return fail(cudaErrorStreamCaptureUnmatched);
  auto ended = std::move(captured);
  *made = nullptr;
  if (ended->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
  auto& joined = ended->seen[ended->origin];
  for (auto& [one, seen] : ended->seen)
    if (joined[one] < seen[one]) return fail(cudaErrorStreamCaptureUnjoined);
  *made = (cudaGraph_t) new Graph(*ended);
  return cudaSuccess;
}
X cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = ((Graph*)graph)->nodes.size();
  return cudaSuccess;
}
X cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                            unsigned long long) {
  auto* one = new Launchable{*(Graph*)graph};
  for (Node& node : one->graph.nodes)
    if (node.stream != one->graph.origin && !one->lanes.count(node.stream)) {
      cudaStream_t lane;
      cudaStreamCreate(&lane);
      one->lanes[node.stream] = (Stream*)lane;
    }
  *made = (cudaGraphExec_t)one;
  return cudaSuccess;
}
X cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}
X cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete (Launchable*)graph;  // what it has launched goes on
  return cudaSuccess;
}
static void record(Hold& hold, Stream& one, std::shared_ptr<Event>& shared);
static void wait(Hold& hold, Stream& one, std::shared_ptr<Event>& shared);
X cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  Hold hold(mutex);
  Stream& origin = at(stream);
  if (takes_part(origin)) return forbid(cudaErrorStreamCaptureUnsupported);
  num_graph_launches++;
  host_time += CALL_S;
  Launchable& launched = *(Launchable*)graph;
  std::map<Event*, std::shared_ptr<Event>> events;  // of the capture -> of this launch
  auto of_launch = [&](const std::shared_ptr<Event>& event) -> std::shared_ptr<Event>& {
    auto& own = events[event.get()];
    if (!own) {
      own = std::make_shared<Event>();
      own->number = ++num_events;
    }
    return own;
  };
  for (Node& node : launched.graph.nodes) {
    Stream& one = node.stream == launched.graph.origin ? origin : *launched.lanes[node.stream];
    if (node.records)
      record(hold, one, of_launch(node.records));
    else if (node.waits)
      wait(hold, one, of_launch(node.waits));
    else {
      log_did(node.logged.did, &one, node.logged.a, node.logged.b, node.logged.c);
      if (node.is_work) put_work(hold, one, node.seconds, node.run);
    }
  }
  return cudaSuccess;
}

// ---- events
static std::shared_ptr<Event>& at(cudaEvent_t event) {
  return *(std::shared_ptr<Event>*)event;
}
X cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  Hold hold(mutex);
  auto one = std::make_shared<Event>();
  one->number = ++num_events;
  *made = (cudaEvent_t) new std::shared_ptr<Event>(one);
  return cudaSuccess;
}
X cudaError_t cudaEventCreate(cudaEvent_t* made) {
  return cudaEventCreateWithFlags(made, 0);
}
X cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Hold hold(mutex);
  delete &at(event);
  return cudaSuccess;
}
static void record(Hold& hold, Stream& one, std::shared_ptr<Event>& shared) {
  log_did(Did::RECORD, &one, (void*)shared->number, nullptr, 0);
  shared->time = std::max(one.time, host_time);
  shared->recorded++;
  shared->capture = 0;
  shared->on = &one;
  TRACE("record event %ld on stream %d", shared->number, one.number);
  Work work;
  work.records = shared;
  work.version = shared->recorded;
  put(hold, one, std::move(work));
}
X cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Hold hold(mutex);
  host_time += CALL_S;
  Stream& one = at(stream);
  auto& shared = at(event);
  if (!takes_part(one)) {
    record(hold, one, shared);
    return cudaSuccess;
  }
  auto fresh = std::make_shared<Event>();  // what was recorded before may be in the graph too
  fresh->number = shared->number;
  fresh->recorded = 1;
  fresh->capture = num_captures;
  fresh->seen = captured->seen[&one];
  shared = fresh;
  captured->nodes.push_back({&one, {}});
  captured->nodes.back().records = shared;
  return cudaSuccess;
}
X cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
static void wait(Hold& hold, Stream& one, std::shared_ptr<Event>& shared) {
  log_did(Did::WAIT, &one, (void*)shared->number, nullptr, 0);
  TRACE("stream %d waits for event %ld", one.number, shared->number);
  if (!shared->recorded) return;
  one.time = std::max(one.time, shared->time);
  Work work;
  work.waits = shared;
  work.version = shared->recorded;
  work.on = shared->on;
  put(hold, one, std::move(work));
}
X cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Hold hold(mutex);
  host_time += CALL_S;
  Stream& one = at(stream);
  auto& shared = at(event);
  if (captured && shared->capture == captured->number) {  // forks `one` off, or joins it
    join(captured->seen[&one], shared->seen);
    captured->nodes.push_back({&one, {}});
    captured->nodes.back().waits = shared;
    return cudaSuccess;
  }
  if (shared->capture) return forbid(cudaErrorCapturedEvent);
  if (takes_part(one) && shared->recorded) return forbid(cudaErrorStreamCaptureIsolation);
  wait(hold, one, shared);
  return cudaSuccess;
}
static bool has_passed(Event& event) {
  return event.passed >= event.recorded && event.time <= host_time;
}
X cudaError_t cudaEventQuery(cudaEvent_t event) {
  {
    Hold hold(mutex);
    host_time += CALL_S;  // a program that asks again and again gets on
    if (at(event)->capture) return forbid(cudaErrorCapturedEvent);
    if (!has_passed(*at(event))) return cudaErrorNotReady;
    log_did(Did::SYNC_EVENT, nullptr, (void*)at(event)->number, nullptr, 0);
  }
  return cudaSuccess;
}
X cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Hold hold(mutex);
  if (captured) return forbid(cudaErrorStreamCaptureUnsupported);
  if (at(event)->capture) return fail(cudaErrorCapturedEvent);
  log_did(Did::SYNC_EVENT, nullptr, (void*)at(event)->number, nullptr, 0);
  std::shared_ptr<Event> shared = at(event);
  long wanted = shared->recorded;
  if (shared->on) run_until(hold, *shared->on, [&] { return shared->passed >= wanted; });
  host_waits(hold, shared->time);
  return cudaSuccess;
}
X cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  Hold hold(mutex);
  if (!has_passed(*at(begin)) || !has_passed(*at(end))) return fail(cudaErrorNotReady);
  double elapsed_ms = (at(end)->time - at(begin)->time) * 1e3;
  *ms = elapsed_ms > 1e-3 ? (float)elapsed_ms : 1e-3f;
  return cudaSuccess;
}

// ---- the log
struct Entry {
  Did did;
  int32_t stream;
  int64_t a, b, c;
};
static std::mutex log_mutex;
static std::vector<Entry> entries;
static std::atomic<bool> logs{false};

void log_did(Did did, void* stream, const void* a, const void* b, size_t c) {
  if (!logs) return;
  std::lock_guard<std::mutex> hold(log_mutex);
  entries.push_back({did, number_of(stream), (int64_t)a, (int64_t)b, (int64_t)c});
}
X void memo_device_log(int on) {  // starts an empty log, or stops it
  std::lock_guard<std::mutex> hold(log_mutex);
  if (on) entries.clear();
  logs = on;
}
X long memo_device_log_read(Entry* into, long room) {  // how many there are
  std::lock_guard<std::mutex> hold(log_mutex);
  for (long i = 0; into && i < room && i < (long)entries.size(); i++) into[i] = entries[i];
  return (long)entries.size();
}
X void memo_device_says(int did, void* stream, void* start, size_t size) {
  Hold hold(mutex);
  Stream& one = at(stream);
  if (takes_part(one))
    captured->nodes.push_back({&one, {(Did)did, start, nullptr, size}});
  else
    log_did((Did)did, stream, start, nullptr, size);
}
X void memo_device_counts(long* out) {
  out[0] = num_launches();
  out[1] = num_triton_launches();
  out[2] = num_copies();
  out[3] = (long)used_bytes();
  out[4] = (long)peak_bytes();
  out[5] = num_host_copies();
  out[6] = num_graph_launches;
}
