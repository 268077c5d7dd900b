// Group calls, and the threads in which the calls of non-blocking communicators happen.
//
// NCCL 2.30.7, src/group.cc, ncclGroupEndInternal and groupLaunch: first the jobs, all at the same time; then
// connections and launches. A group of blocking communicators returns when all is launched; one of non-blocking
// communicators starts a thread, sets their state to ncclInProgress and returns that; the state of the outcome is set
// when the thread is done. A call outside a group is a group of its own.
#include "group.h"

#include <thread>

#include "log.h"

namespace emulated {
namespace {

struct PendingJob {
  CommunicatorPointer communicator;
  Job run;
};
struct Group {
  int depth = 0;
  bool blocking = true, decided = false;
  ncclResult_t error = ncclSuccess;
  std::vector<PendingJob> jobs;
  std::vector<Plan> plans;
};
thread_local Group group;

// "Blocking and nonblocking communicators are not allowed in the same group", except that ending one makes it blocking.
ncclResult_t join_group(const CommunicatorPointer& communicator, bool ends) {
  if (ends) {
    group.blocking = group.decided = true;
  } else if (!group.decided) {
    group.blocking = communicator->blocking;
    group.decided = true;
  } else if (group.blocking != communicator->blocking) {
    return failed(communicator.get(), ncclInvalidArgument, "blocking and non-blocking communicators in one group");
  }
  return ncclSuccess;
}

ncclResult_t run_jobs(const std::vector<PendingJob>& jobs) {
  if (jobs.size() == 1) return jobs[0].run();
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(jobs.size());
  for (size_t k = 0; k < jobs.size(); k++)
    threads.emplace_back([&, k] {
      cudaSetDevice(jobs[k].communicator->device);
      results[k] = jobs[k].run();
    });
  for (auto& thread : threads) thread.join();
  for (ncclResult_t result : results)
    if (result != ncclSuccess) return result;
  return ncclSuccess;
}

ncclResult_t run_group(const Group& work) {
  ncclResult_t result = run_jobs(work.jobs);
  for (auto& plan : work.plans)
    if (result == ncclSuccess) result = launch(plan);
  return result;
}

void run_in_thread(std::shared_ptr<Group> work) {
  std::set<CommunicatorPointer> all;
  for (auto& job : work->jobs) all.insert(job.communicator);
  for (auto& plan : work->plans) all.insert(plan.communicator);
  for (auto& communicator : all) {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    communicator->jobs++;
    communicator->state = ncclInProgress;
  }
  std::thread([work, all] {
    if (!all.empty()) cudaSetDevice((*all.begin())->device);
    ncclResult_t result = run_group(*work);
    for (auto& communicator : all) {
      {
        std::lock_guard<std::mutex> lock(communicator->mutex);
        // A peer's death may have been noticed meanwhile, by a kernel that was just launched: that stays.
        int in_progress = ncclInProgress;
        communicator->state.compare_exchange_strong(in_progress, result);
        communicator->jobs--;
      }
      communicator->changed.notify_all();
    }
  }).detach();
}

ncclResult_t end_group() {
  Group work = std::move(group);
  group = Group();
  if (work.error != ncclSuccess) return work.error;
  if (work.jobs.empty() && work.plans.empty()) return ncclSuccess;
  if (!work.blocking) {
    run_in_thread(std::make_shared<Group>(std::move(work)));
    return ncclInProgress;
  }
  int device;
  cudaGetDevice(&device);
  ncclResult_t result = run_group(work);
  cudaSetDevice(device);
  return result;
}

ncclResult_t leave_group() { return --group.depth ? ncclSuccess : end_group(); }

}  // namespace

ncclResult_t submit(const CommunicatorPointer& communicator, Job job, bool ends) {
  group.depth++;
  if (ncclResult_t error = join_group(communicator, ends))
    group.error = error;
  else
    group.jobs.push_back({communicator, std::move(job)});
  return leave_group();
}

ncclResult_t submit(const CommunicatorPointer& communicator, const Operation& operation, cudaStream_t stream) {
  group.depth++;
  if (ncclResult_t error = join_group(communicator, false)) {
    group.error = error;
    return leave_group();
  }
  Plan* plan = nullptr;
  for (auto& known : group.plans)
    if (known.communicator == communicator) plan = &known;
  if (!plan) {
    group.plans.push_back({communicator, {}, {}});
    plan = &group.plans.back();
  }
  bool known = false;
  for (cudaStream_t other : plan->streams) known = known || other == stream;
  if (!known) plan->streams.push_back(stream);
  plan->operations.push_back(operation);
  return leave_group();
}

ncclResult_t refuse(ncclResult_t result) {
  if (group.depth && group.error == ncclSuccess) group.error = result;  // src/include/group.h, ncclGroupErrCheck
  return result;
}

}  // namespace emulated

using namespace emulated;

NCCL_FUNCTION ncclResult_t ncclGroupStart() {
  group.depth++;
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclGroupEnd() {
  if (!group.depth) return failed(nullptr, ncclInvalidUsage, "ncclGroupEnd: not in a group call");
  return leave_group();
}
