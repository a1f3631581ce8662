// A fixed team of threads that walks through a step's phases together: tasks are taken from a counter, then all wait for one another.
// Who takes a task never changes what is computed. Who waits spins for about 50 us, then sleeps: a core that others need is given up.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <thread>
#include <vector>

class Team {
   public:
    explicit Team(int size) : size_(size) {
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
        meet();
        call(0);
        meet();
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

    void work(int index) {
        for (;;) {
            meet();
            if (!job_) return;
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
        for (int i = 0; i < SPINS; i++) {
            if (generation_.load(std::memory_order_acquire) != now) return;
            _mm_pause();
        }
        generation_.wait(now);
    }

    static constexpr int SPINS = 4000;
    const int size_;
    void (*job_)(const void*, int) = nullptr;
    const void* what_ = nullptr;
    std::vector<Counter> taken_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> generation_{0};
    std::vector<std::thread> threads_;
};
