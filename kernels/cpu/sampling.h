// From a row of logits x to a token, as replica/sampler.py means it; a row is one task, and depends on nothing but itself.
//
//   d = x - best, s = d / temperature, both rounded to float32. s never falls where d rises: thresholds are sought among the d.
//   min-p   s >= log(min_p)
//   top-k   s >= that of the k-th largest d
//   top-p   s >= that of the largest d that has, with all larger ones, top_p of the mass that the two leave (of ties for the k-th place
//           those that there are places for). The mass of a token is 2^(d · log2(e) / temperature), to the nearest multiple of 2^-units:
//           sums of it are exact in float64, and so the same in whatever order.
//   draw    the largest s + noise in float64, of equals the first; noise as in kernels/reference/noise.py
//
// Nothing is sorted: a threshold is closed in on by parting the range of values, and only those of the part that has it are looked at
// again. Bytes: the row from two to five times, some 12 more for a token that stays. Operations: some 25 a token for its mass, 50 for noise.
#pragma once
#include <bit>
#include <cmath>
#include <vector>

#include "simd.h"

struct Draw {  // as Python passes it
    int64_t row, best_token;  // of logits; the first of the largest
    uint64_t seed, choice, position;
    int64_t top_k;                     // on where 0 < top_k < V
    double temperature, top_p, min_p;  // on where top_p < 1, min_p > 0
    double best;                       // logit
    bool is_sound(int rows, int size) const {
        return row >= 0 && row < rows && best_token >= 0 && best_token < size && temperature > 0 && best - best == 0;
    }
};

class Sampler {  // of one thread
   public:
    void fit(int size) {
        size_ = size, units_ = 52 - (int)std::bit_width((unsigned)size);
        if (values_.size() < (size_t)size + LANES) values_.resize(size + LANES), masses_.resize(size + LANES);
    }

    int draw(const float* x, const Draw& one) {
        best_ = all((float)one.best), temperature_ = (float)one.temperature, unit_ = LOG2_E / temperature_;
        return loudest(x, one, lowest(cut(x, one) / temperature_));
    }

   private:
    static constexpr float LOG2_E = 1.4426950409f, FINITE = -3.4028235e38f;
    static constexpr int FEW = 16;              // of the row one of so many is a sample of it
    static constexpr int FAR = 1024;            // ahead, to be fetched
    static constexpr int BATCH = 256;           // tokens
    static constexpr double ROUNDING = 0.9999;  // more than what is compared in float32 can be wrong by
    static constexpr uint64_t WEYL = 0x9E3779B97F4A7C15;

    // The least d whose s reaches `least`: below 0 floats are ordered as their bits are, the other way round.
    float lowest(float least) const {
        uint32_t reaches = 0, fails = 0x7F800001;
        while (fails - reaches > 1) {
            const uint32_t middle = reaches + (fails - reaches) / 2;
            (-std::bit_cast<float>(middle) / temperature_ >= least ? reaches : fails) = middle;
        }
        return -std::bit_cast<float>(reaches);
    }

    // A d that, with all larger ones, is what the filters leave. A sample says where to look first; whatever it says, what is found is the same.
    float cut(const float* x, const Draw& one) {
        float least = one.min_p > 0 ? lowest(std::min((float)std::log(one.min_p), 0.0f)) : -INFINITY;
        if (one.top_k > 0 && one.top_k < size_) {
            const float lowest = std::max(least, FINITE);
            gather<FEW>(x, lowest, INFINITY);
            gather(x, narrowed<false>(2.0 * (double)one.top_k / FEW + 4), INFINITY);
            if (count_ <= one.top_k) gather(x, lowest, INFINITY);
            if (one.top_k < count_) least = narrowed<false>((double)one.top_k);
        }
        return one.top_p < 1 ? cut_by_mass(x, one, least) : least;
    }
    float cut_by_mass(const float* x, const Draw& one, float least) {
        const float lowest = std::max({least, FINITE, -(float)(units_ + 2) / unit_});  // what is below weighs nothing
        gather<FEW>(x, lowest, INFINITY);
        const float guess = narrowed<true>(one.top_p * weigh()), low = std::max(guess - 1 / unit_, lowest);
        Sum every;
        int64_t count = 0;
        Held upper(*this);
        each(x, lowest, INFINITY, [&](F d, uint32_t lanes, int) {
            every.add(kept(masses(d), lanes)), count += std::popcount(lanes);
            upper.take(d, lanes & at_least(d, all(low)));
        });
        upper.end();
        double wanted = every.value();
        if (one.top_k > 0 && one.top_k < count) wanted -= (double)(count - one.top_k) * mass(least);
        wanted *= one.top_p;
        const double found = weigh();
        if (found < wanted) wanted -= found, gather(x, lowest, low), weigh();
        return narrowed<true>(wanted);
    }

    // see(d, lanes, place) for what has from <= d < below, in order; `lanes` says which of the sixteen from `place` on. OF: of so many one.
    template <int OF = 1, class See>
    void each(const float* x, float from, float below, const See& see) const {
        const auto sixteen = [&](F v, uint32_t there, int i) {
            const F d = sub(v, best_);
            const uint32_t lanes = at_least(d, all(from)) & ~at_least(d, all(below)) & there;
            if (lanes) see(d, lanes, i);
        };
        const int whole = size_ / LANES * LANES;
        for (int i = 0; i < whole; i += OF * LANES) prefetch(x + i + FAR), sixteen(load(x + i), lanes_below(LANES), i);
        if (whole < size_) sixteen(load_some(x + whole, size_ - whole), lanes_below(size_ - whole), whole);
    }
    template <int OF = 1>
    void gather(const float* x, float from, float below) {
        Held held(*this);
        each<OF>(x, from, below, [&](F d, uint32_t lanes, int) { held.take(d, lanes); });
        held.end();
    }
    struct Held {  // fills values_
        Sampler& own;
        int count = 0;
        F low = zero();
        void take(F d, uint32_t lanes) {
            low = least(low, kept(d, lanes));
            pack(&own.values_[count], d, lanes), count += std::popcount(lanes);
        }
        void end() { own.count_ = count, own.low_ = bottom(low); }
        explicit Held(Sampler& own) : own(own) {}
    };

    F masses(F d) const { return rounded(times_power(power_of_two(mul(d, all(unit_))), all((float)units_))); }
    double mass(float d) const { return top(masses(all(d))); }
    double weigh() {
        Sum total;
        for (int i = 0; i < count_; i += LANES) {
            const F m = kept(masses(load(&values_[i])), lanes_below(count_ - i));
            store(&masses_[i], m), total.add(m);
        }
        return total.value();
    }

    // The largest value that, with all larger ones, weighs `wanted`, where each weighs its mass or 1. Only what it had to look at stays.
    template <bool BY_MASS>
    float narrowed(double wanted) {
        float high = 0;
        while (low_ < high) {
            const float near = low_ < -1 ? -std::sqrt(-low_) : low_, halfway = low_ + (high - low_) / 2;  // most cuts are near the best
            const float middle = near > halfway && near <= high ? near : halfway > low_ ? halfway : high;
            const double upper = weight<BY_MASS>(middle);
            const bool is_enough = upper >= wanted;
            keep<BY_MASS>(middle, is_enough);
            if (!is_enough) wanted -= upper, high = std::nextafter(middle, -INFINITY);
        }
        return low_;
    }
    template <bool BY_MASS>
    double weight(float from) const {
        Sum total;
        int count = 0;
        for (int i = 0; i < count_; i += LANES) {
            const uint32_t lanes = at_least(load(&values_[i]), all(from)) & lanes_below(count_ - i);
            if (BY_MASS) total.add(kept(load(&masses_[i]), lanes));
            else count += std::popcount(lanes);
        }
        return BY_MASS ? total.value() : count;
    }
    template <bool BY_MASS>
    void keep(float middle, bool upper) {
        int to = 0;
        F low = zero();
        for (int i = 0; i < count_; i += LANES) {
            const F d = load(&values_[i]);
            const uint32_t above = at_least(d, all(middle)), lanes = (upper ? above : ~above) & lanes_below(count_ - i);
            if (!lanes) continue;
            low = least(low, kept(d, lanes));
            if (BY_MASS) pack(&masses_[to], load(&masses_[i]), lanes);
            pack(&values_[to], d, lanes), to += std::popcount(lanes);
        }
        count_ = to, low_ = bottom(low);
    }

    static uint64_t mixed(uint64_t value) {  // splitmix64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
        value = (value ^ value >> 27) * 0x94D049BB133111EB;
        return value ^ value >> 31;
    }
    static uint32_t noise_bits(uint64_t key, int64_t token) { return (uint32_t)(mixed(((uint64_t)token + 1) * WEYL + key) >> 32); }
    static double gumbel(uint32_t bits) { return -std::log(-std::log(((double)bits + 0.5) * 0x1p-32)); }

    struct Leader {  // the token of the largest s + noise so far
        int64_t token;
        double loudness;
        float bar;
        Leader(int64_t token, double loudness) : token(token), loudness(loudness), bar((float)(std::exp(loudness) * ROUNDING)) {}
    };

    int loudest(const float* x, const Draw& one, float from) const {
        uint64_t key = 0;
        for (const uint64_t part : {one.seed, one.choice, one.position}) key = mixed((key ^ part) + WEYL);
        Leader leader(one.best_token, gumbel(noise_bits(key, one.best_token)));
        float d[BATCH + LANES] = {};
        int32_t tokens[BATCH + LANES] = {};
        int count = 0;
        each(x, from, INFINITY, [&](F v, uint32_t lanes, int place) {
            pack(d + count, v, lanes), pack(tokens + count, count_up(place), lanes);
            count += std::popcount(lanes);
            if (count >= BATCH) hear(d, tokens, count, key, leader), count = 0;
        });
        hear(d, tokens, count, key, leader);
        return (int)leader.token;
    }
    // exp(s) / (1 - u) is no less than exp(s + noise) and costs no logarithm: only who reaches the leader by it is heard.
    [[gnu::noinline]] void hear(const float* d, const int32_t* tokens, int count, uint64_t key, Leader& leader) const {
        for (int from = 0; from < count; from += LANES, d += LANES, tokens += LANES) {
            uint32_t bits[LANES];
            float rest[LANES];
            for (int i = 0; i < LANES; i++) bits[i] = noise_bits(key, tokens[i]);
            for (int i = 0; i < LANES; i++) rest[i] = ((float)~bits[i] + 0.5f) * 0x1p-32f;
            const F bound = power_of_two(mul(load(d), all(unit_)));
            for (uint32_t left = at_least(bound, mul(all(leader.bar), load(rest))) & lanes_below(count - from); left; left &= left - 1) {
                const int i = std::countr_zero(left);
                const double loudness = (double)(d[i] / temperature_) + gumbel(bits[i]);
                if (loudness > leader.loudness || (loudness == leader.loudness && tokens[i] < leader.token)) leader = Leader(tokens[i], loudness);
            }
        }
    }

    int size_ = 0, units_ = 0, count_ = 0;  // count_: of values_
    float temperature_ = 1, unit_ = 1, low_ = 0;  // low_: the least of values_
    F best_ = zero();
    std::vector<float> values_, masses_;
};
