// A fixed team of threads that walks through a step's phases together: tasks are taken from a counter, then all wait for one another.
// Who takes a task never changes what is computed. Who waits spins, then sleeps: a core that others need is given up. A team that keeps to its
// cores spins for two milliseconds: whoever pushes a thread aside, a router, its proxy or Ray, wants its core for some 100 us, several hundred
// times a second, and the thread is back sooner than one that has to be woken.
// A team as large as the set of cores that its maker may use keeps to them while it runs, each thread to one: Linux, left to itself, puts
// two of low priority on one core when somebody else wakes on the other, and lets that one stand idle afterwards. Where somebody else keeps
// a core for long, it is Linux who finds the way round: the runs that follow four in which the caller had less than half of its time are free.
#pragma once
#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <thread>
#include <vector>

class Team {
   public:
    explicit Team(int size) : size_(size) {
        cpu_set_t usable;
        if (size > 1 && !sched_getaffinity(0, sizeof usable, &usable) && CPU_COUNT(&usable) == size)
            for (int core = 0; core < CPU_SETSIZE; core++)
                if (CPU_ISSET(core, &usable)) cores_.push_back(core);
        try {
            for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { work(i); });
        } catch (...) {  // those that never came count as arrived, so that those that did can leave
            arrived_.fetch_add(size - 1 - (int)threads_.size());
            leave();
            throw;
        }
    }
    ~Team() { leave(); }
    int size() const { return size_; }

    // body(worker) on every thread, the caller's included; `phases` bounds the calls of Worker::each in it.
    template <class Body>
    void run(int phases, const Body& body) {
        if ((int)taken_.size() < phases) taken_ = std::vector<Counter>(phases);
        for (auto& counter : taken_) counter.value.store(0, std::memory_order_relaxed);
        const auto call = [&](int index) { body(Worker(*this, index)); };
        job_ = [](const void* what, int index) { (*static_cast<const decltype(call)*>(what))(index); };
        what_ = &call;
        const bool stays = !cores_.empty() && free_runs_-- <= 0;
        stays_.store(stays, std::memory_order_relaxed);
        const Clock began;
        {
            const Stay stay(*this, 0);  // the caller goes where it likes afterwards
            meet();
            call(0);
            meet();
        }
        if (!stays) return;
        crowded_runs_ = began.is_crowded() ? crowded_runs_ + 1 : 0;
        free_runs_ = crowded_runs_ >= CROWDED_RUNS ? FREE_RUNS : 0;
    }

    class Worker {
       public:
        Worker(Team& team, int index) : index(index), team_(team) {}
        // task(i) for i = 0 … count - 1, shared out in runs of `grain`; returns when all tasks of all threads are done.
        template <class Task>
        void each(int count, int grain, const Task& task) {
            auto& taken = team_.taken_[phase_++].value;
            for (int first; (first = taken.fetch_add(grain, std::memory_order_relaxed)) < count;)
                for (int i = first; i < count && i < first + grain; i++) task(i);
            team_.meet();
        }
        const int index;

       private:
        Team& team_;
        int phase_ = 0;
    };

   private:
    void leave() {
        job_ = nullptr;
        meet();
        for (auto& thread : threads_) thread.join();
    }

    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    // On its core until the end of the scope.
    struct Stay {
        Stay(const Team& team, int index)
            : moved_(team.stays_ && !sched_getaffinity(0, sizeof before_, &before_) && CPU_ISSET(team.cores_[index], &before_)) {
            if (!moved_) return;
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(team.cores_[index], &one);
            sched_setaffinity(0, sizeof one, &one);
        }
        ~Stay() {
            if (moved_) sched_setaffinity(0, sizeof before_, &before_);
        }
        cpu_set_t before_;
        const bool moved_;
    };

    struct Clock {
        static double seconds(clockid_t which) {
            timespec now;
            clock_gettime(which, &now);
            return now.tv_sec + 1e-9 * now.tv_nsec;
        }
        bool is_crowded() const { return 2 * (seconds(CLOCK_THREAD_CPUTIME_ID) - own_) < seconds(CLOCK_MONOTONIC) - wall_; }
        const double wall_ = seconds(CLOCK_MONOTONIC), own_ = seconds(CLOCK_THREAD_CPUTIME_ID);
    };

    void work(int index) {
        for (;;) {
            meet();
            if (!job_) return;
            const Stay stay(*this, index);
            job_(what_, index);
            meet();
        }
    }

    void meet() {
        if (size_ == 1) return;
        const unsigned now = generation_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(now + 1);
            return generation_.notify_all();
        }
        const double patience = stays_.load(std::memory_order_relaxed) ? PATIENCE_ON_CORES : PATIENCE;
        for (const double began = Clock::seconds(CLOCK_MONOTONIC); Clock::seconds(CLOCK_MONOTONIC) - began < patience;)
            for (int i = 0; i < SPINS; i++) {
                if (generation_.load(std::memory_order_acquire) != now) return;
                _mm_pause();
            }
        generation_.wait(now);
    }

    static constexpr int SPINS = 64, CROWDED_RUNS = 4, FREE_RUNS = 64;  // spins: between two looks at the clock
    static constexpr double PATIENCE = 50e-6, PATIENCE_ON_CORES = 2e-3;  // seconds
    const int size_;
    std::vector<int> cores_;  // one for each thread, or none
    std::atomic<bool> stays_{false};  // a run's; those who still wait for the next one may read it as that begins
    int crowded_runs_ = 0, free_runs_ = 0;  // in a row; to come
    void (*job_)(const void*, int) = nullptr;
    const void* what_ = nullptr;
    std::vector<Counter> taken_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> generation_{0};
    std::vector<std::thread> threads_;
};
