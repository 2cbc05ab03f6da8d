// Threads that share the work of one decoding step. They are our own, because an OpenMP team belongs to the thread that
// calls it: a step in another thread would start a second team, and both would wait by spinning on the same cores.
//
// Items are claimed one by one, and the caller claims too: a thread that sleeps, or that another process has pushed off
// its core, has claimed nothing and is not waited for.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "vectors.h"

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline i64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return i64(now.tv_sec) * 1000000000 + now.tv_nsec;
}

class Pool {
    // A job's number (24 bits), items (20) and the next item (20). A claim adds 1, so it names the job that it belongs to,
    // and that job cannot end before the claimed item is done: `work_` and `context_` are then those of this job.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<i64> done_{0};
    void (*work_)(const void*, i64) = nullptr;
    const void* context_ = nullptr;
    std::atomic<int> allowed_{0};   // workers that may take part; the others sleep
    std::atomic<int> sleeping_{0};
    std::atomic<bool> ending_{false};
    std::mutex busy_, door_;
    std::condition_variable bell_, gate_;  // for those that may take part; for the others
    std::vector<std::thread> workers_;
    Pool* parents_;  // kept reachable, see `current`

    static const int BITS = 20;
    static const uint64_t MASK = (uint64_t(1) << BITS) - 1;
    // Waiting workers spin this long, which covers the caller's own work between two steps of a small model. A worker that
    // notices another process on its core sleeps at once.
    static const i64 SPIN = 150000, TAKEN = 30000;

    // Whether an item was left to do.
    bool help() {
        uint64_t now = ticket_.load(std::memory_order_relaxed);
        if ((now & MASK) >= (now >> BITS & MASK)) return false;
        now = ticket_.fetch_add(1, std::memory_order_acq_rel);
        if ((now & MASK) >= (now >> BITS & MASK)) return false;
        work_(context_, i64(now & MASK));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void sleep(int number) {
        std::unique_lock<std::mutex> lock(door_);
        gate_.wait(lock, [&] { return ending_ || number < allowed_; });
        sleeping_.fetch_add(1);
        bell_.wait(lock, [&] {
            uint64_t now = ticket_.load();
            return ending_ || number >= allowed_ || (now & MASK) < (now >> BITS & MASK);
        });
        sleeping_.fetch_sub(1);
    }

    void serve(int number) {
        i64 since = nanoseconds();
        for (i64 round = 1; !ending_.load(std::memory_order_relaxed); round++) {
            if (number < allowed_.load(std::memory_order_relaxed) && help()) {
                while (help()) {}
                since = nanoseconds(), round = 0;
                continue;
            }
            relax();
            if (round % 64) continue;
            i64 before = nanoseconds();
            if (before - since > SPIN || number >= allowed_.load(std::memory_order_relaxed)) {
                sleep(number);
                since = nanoseconds();
            } else if (before - since > SPIN / 8) {
                sched_yield();
                if (nanoseconds() - before > TAKEN) since -= SPIN;
            }
        }
    }

    void grow(int workers) {
        std::lock_guard<std::mutex> lock(door_);
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are for the threads of the program
        try {
            while (!ending_ && int(workers_.size()) < workers)
                workers_.emplace_back([this, number = int(workers_.size())] { serve(number); });
        } catch (const std::system_error&) {  // no more threads: those that there are do the work
        }
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
    }

    void publish(i64 items, void (*work)(const void*, i64), const void* context) {
        work_ = work, context_ = context;
        done_.store(0, std::memory_order_relaxed);
        uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 2 * BITS) + 1;
        ticket_.store(number << 2 * BITS | uint64_t(items) << BITS);
        if (sleeping_.load()) {
            { std::lock_guard<std::mutex> lock(door_); }
            bell_.notify_all();
        }
        while (help()) {}
        i64 round = 0;
        while (done_.load(std::memory_order_acquire) < items) {
            relax();
            if (++round > 2000) sched_yield();  // its worker has lost its core
        }
    }

  public:
    explicit Pool(Pool* parents) : parents_(parents) {}

    // Ends the workers. A caller in another thread goes on alone.
    void end_workers() {
        {
            std::lock_guard<std::mutex> lock(door_);
            ending_ = true;
        }
        bell_.notify_all(), gate_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    // One caller at a time has the workers: `begin` tells whether it is this one, then `end` must follow.
    bool begin(int threads) {
        if (threads < 2 || ending_ || !busy_.try_lock()) return false;
        if (allowed_ != threads - 1) {
            std::lock_guard<std::mutex> lock(door_);
            allowed_ = threads - 1;
            gate_.notify_all();
        }
        if (int(workers_.size()) < threads - 1) grow(threads - 1);
        return true;
    }
    void end() { busy_.unlock(); }

    static const i64 MOST = MASK / 2;

    template <class F>
    void run(i64 items, const F& work) {
        publish(items, [](const void* context, i64 item) { (*(const F*)context)(item); }, &work);
    }

    // The pool of this process, never deleted, because a thread may still compute while the process exits. A child of
    // fork has none of its parent's threads: it gets a pool of its own, and leaves alone the copy of the parent's, whose
    // locks may be held.
    static Pool*& current() {
        static Pool* pool = new Pool(nullptr);
        static Owner owner;
        return pool;
    }

  private:
    struct Owner {
        Owner() { pthread_atfork(nullptr, nullptr, [] { current() = new Pool(current()); }); }
        ~Owner() { current()->end_workers(); }
    };
};

// The threads of one call, at most `threads`, the caller included. Without workers the caller does everything.
class Team {
    Pool* pool_;
    i64 threads_;
    bool own_;

  public:
    explicit Team(i64 threads)
        : pool_(Pool::current()), threads_(std::min<i64>(threads, 256)), own_(pool_->begin(int(threads_))) {}
    ~Team() {
        if (own_) pool_->end();
    }
    Team(const Team&) = delete;

    // work(i) for i in 0 .. items - 1, each about `cost` multiply-adds. Neighbours go to one thread: so small ones are
    // worth a claim, and weights are read in long pieces.
    template <class F>
    void each(i64 items, i64 cost, const F& work) const {
        const i64 least = 1 << 13, pieces = 8;
        if (!own_ || items < 2 || items * cost < 2 * least) {
            for (i64 i = 0; i < items; i++) work(i);
            return;
        }
        i64 grain = std::max<i64>(least / std::max<i64>(1, cost), items / (threads_ * pieces));
        grain = std::max<i64>(1, std::max(grain, items / Pool::MOST + 1));
        pool_->run((items + grain - 1) / grain, [&](i64 part) {
            for (i64 i = part * grain; i < std::min(items, (part + 1) * grain); i++) work(i);
        });
    }
};
