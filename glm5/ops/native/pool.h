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
    // A job's number (26 bits), its pieces (6), and a bit for each piece that is claimed (32). Whoever claims a piece of a
    // job sees that job's `work_` and `context_`, because the job cannot end before this piece is done.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<i64> done_{0};  // pieces done by workers
    alignas(64) void (*work_)(const void*, i64) = nullptr;
    const void* context_ = nullptr;
    std::atomic<int> allowed_{0};  // workers that may take part; the others sleep
    std::atomic<int> sleeping_{0};
    std::atomic<int> core_{-1};  // that the caller runs on
    std::atomic<bool> ending_{false};
    std::mutex busy_, door_;
    std::condition_variable bell_, gate_;  // for those that may take part; for the others
    std::vector<std::thread> workers_;
    Pool* parents_;  // kept reachable, see `current`

    // Waiting workers spin this long, which covers the caller's own work between two steps of a small model. A worker that
    // notices another process on its core sleeps at once.
    static constexpr i64 SPIN = 150000, TAKEN = 30000;

    static uint32_t left(uint64_t ticket) {
        i64 pieces = ticket >> 32 & 63;
        return ~uint32_t(ticket) & uint32_t((uint64_t(1) << pieces) - 1);
    }

    // Does the pieces that nobody has claimed; how many. The first choice of each thread is another one and always the
    // same, so that it finds the weights of the step before in its own cache.
    i64 help(int thread) {
        i64 mine = 0;
        uint64_t now = ticket_.load(std::memory_order_relaxed);
        for (uint32_t rest; (rest = left(now));) {
            i64 pieces = now >> 32 & 63, own = thread * pieces / (allowed_.load(std::memory_order_relaxed) + 1) & 31;
            uint32_t later = rest >> own << own;
            i64 piece = __builtin_ctz(later ? later : rest);
            if (!ticket_.compare_exchange_weak(now, now | uint64_t(1) << piece, std::memory_order_acq_rel,
                                               std::memory_order_relaxed))
                continue;
            work_(context_, piece);
            mine++;
            now = ticket_.load(std::memory_order_relaxed);
        }
        return mine;
    }

    // Until there is another job than the last one that was seen; it may be over by now, but more follow.
    void sleep(int number, uint64_t seen) {
        std::unique_lock<std::mutex> lock(door_);
        gate_.wait(lock, [&] { return ending_ || number < allowed_; });
        sleeping_.fetch_add(1);
        bell_.wait(lock, [&] {
            return ending_ || number >= allowed_ || ticket_.load() >> 38 != seen >> 38;
        });
        sleeping_.fetch_sub(1);
    }

    // Leaves the caller's core. The kernel wakes a thread on the core of the one that wakes it, and moves it away late.
    // Whether it was there.
    bool part() {
        int here = sched_getcpu();
        cpu_set_t own, others;
        if (here < 0 || here != core_.load(std::memory_order_relaxed) || sched_getaffinity(0, sizeof(own), &own))
            return false;
        others = own;
        CPU_CLR(here, &others);
        if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof(others), &others)) return false;
        sched_setaffinity(0, sizeof(own), &own);
        return true;
    }

    void serve(int number) {
        part();
        i64 since = nanoseconds();
        for (i64 round = 1; !ending_.load(std::memory_order_relaxed); round++) {
            i64 mine = number < allowed_.load(std::memory_order_relaxed) ? help(number + 1) : 0;
            if (mine) {
                done_.fetch_add(mine, std::memory_order_release);
                since = 0, round = 0;
                continue;
            }
            relax();
            if (round % 64) continue;
            i64 before = nanoseconds();
            uint64_t seen = ticket_.load(std::memory_order_relaxed);
            if (left(seen)) continue;
            if (!since) since = before;
            if (before - since > SPIN || number >= allowed_.load(std::memory_order_relaxed)) {
                sleep(number, seen);
                part();
                since = 0;
            } else if (before - since > SPIN / 8) {
                sched_yield();
                if (nanoseconds() - before > TAKEN && !part()) since -= SPIN;
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

    void publish(i64 pieces, void (*work)(const void*, i64), const void* context) {
        work_ = work, context_ = context;
        done_.store(0, std::memory_order_relaxed);
        uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 38) + 1;
        ticket_.store(number << 38 | uint64_t(pieces) << 32);
        if (sleeping_.load()) {
            { std::lock_guard<std::mutex> lock(door_); }
            bell_.notify_all();
        }
        i64 rest = pieces - help(0), round = 0;
        while (done_.load(std::memory_order_acquire) < rest) {
            relax();
            if (++round > 2000) sched_yield();  // a worker has lost its core
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
        core_.store(sched_getcpu(), std::memory_order_relaxed);
        if (allowed_ != threads - 1) {
            std::lock_guard<std::mutex> lock(door_);
            allowed_ = threads - 1;
            gate_.notify_all();
        }
        if (int(workers_.size()) < threads - 1) grow(threads - 1);
        return true;
    }
    void end() { busy_.unlock(); }

    static constexpr i64 MOST = 32;  // pieces of a job

    template <class F>
    void run(i64 pieces, const F& work) {
        publish(pieces, [](const void* context, i64 piece) { (*(const F*)context)(piece); }, &work);
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
        : pool_(Pool::current()), threads_(std::min(threads, Pool::MOST)), own_(pool_->begin(int(threads_))) {}
    ~Team() {
        if (own_) pool_->end();
    }
    Team(const Team&) = delete;

    // work(i) for i in 0 .. items - 1, each about `cost` multiply-adds. Neighbours go to one thread, which then reads
    // weights in long pieces.
    template <class F>
    void each(i64 items, i64 cost, const F& work) const {
        const i64 least = 1 << 13;
        if (!own_ || items < 2 || items * cost < 2 * least) {
            for (i64 i = 0; i < items; i++) work(i);
            return;
        }
        i64 pieces = threads_ * std::min<i64>(4, 2 + items * cost / (threads_ << 20));
        pieces = std::min(std::min(pieces, items), std::min(Pool::MOST, items * cost / least));
        pool_->run(pieces, [&](i64 piece) {
            for (i64 i = items * piece / pieces; i < items * (piece + 1) / pieces; i++) work(i);
        });
    }
};
