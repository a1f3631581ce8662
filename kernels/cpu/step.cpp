// One call computes a step of a decoder: token ids of a mixed batch (decodes and chunks of prompts) to hidden states and logits,
// over the paged cache. Plain C interface; what an architecture is, the table of layers says (kernels/cpu/decoder.py fills it).
//
// A layer: norm → qkv → rope, cache write → attention → out, + stream → norm → gate · up → down, + stream. Eight meetings of the team,
// five where there are few tokens. Bytes of a step: every weight once, the cache of every row once (more in a long chunk). The residual
// stream is float32; what enters a product is bf16, or int8 by groups of 32 for quantised weights. A row never sees another: all sums
// run in a fixed order over K and over keys, so a token's logits are the same bits alone, batched, chunked or computed again.
#include <exception>

#include "attention.h"
#include "sampling.h"
#include "team.h"

extern "C" {

struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *feed_forward_norm;  // query_norm and key_norm [D] may be null
    Matrix qkv, out, gate_up, down;  // gate_up: panels of gate and up by turns
    int64_t window;                  // 0: none
};

struct Model {
    int32_t layers, hidden, heads, kv_heads, dim, width, vocabulary, block;  // width: of the feed-forward part
    int32_t positions, threads;
    float epsilon, attention_scale;
    int64_t pages;
    int64_t int8_cache;         // else bf16
    uint8_t* pool;              // [layers][pages], a page: attention.h
    const float *cosine, *sine; // [positions][D/2]
    const Layer* layer;
    Matrix embedding, head;
    const float* norm;
};

struct Step {
    int32_t tokens, rows, table_width, wanted_count;
    const int64_t* ids;                                // [T]
    const int32_t *starts, *counts, *tables, *wanted;  // [R], [R], [R][table_width], places of tokens whose logits are wanted
    float *hidden, *logits;  // [T][H], the stream after the last layer; [wanted][vocabulary]
    int64_t* best;           // [wanted] the first of the largest logits, and its value, NaN if one is not finite
    float* best_logits;
    const int32_t* table(int row) const { return tables + (size_t)row * table_width; }
};
}

namespace {

enum Fault { FINE = 0, BAD_SHAPE = 1, BAD_TOKEN = 2, BAD_POSITION = 3, BAD_PAGE = 4, BAD_PLACE = 5, NO_MEMORY = 6, BAD_DRAW = 7 };

class Buffer {  // the activations that a matrix reads, in the form that it wants
   public:
    void reserve(int rows, int width, bool bf16, bool quantised) {
        view_.rows = rows, view_.stride = width + GROUP;
        const size_t size = (size_t)rows * view_.stride, bytes = size * (WORDS_FOR_Q8 ? 2 : 1);
        if (bf16 && bf16_.size() < size) bf16_.resize(size);
        if (quantised && q_.size() < bytes) q_.resize(bytes), scale_.resize(size / GROUP), sum_.resize(size / GROUP), shift_.resize(size / GROUP);
        view_.bf16 = bf16_.data(), view_.q = q_.data(), view_.scale = scale_.data(), view_.sum = sum_.data(), view_.shift = shift_.data();
    }
    Rows of(const Matrix& reader) const {
        Rows rows = view_;
        rows.form = reader.kind == BF16 ? AS_NUMBERS : WORDS_FOR_Q8 && reader.kind == Q8 ? AS_WORDS : AS_BYTES;
        return rows;
    }

   private:
    Rows view_;
    Lines<Number> bf16_;
    Lines<int8_t> q_;
    Lines<float> scale_, sum_;
    Lines<int32_t> shift_;
};

// x / sqrt(mean(x²) + epsilon) · weight; n in whole lanes.
void normalise(const float* x, const float* weight, int n, float epsilon, float* out) {
    F squares = zero();
    for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const F by = all(1.0f / std::sqrt(sum(squares) / (float)n + epsilon));
    for (int i = 0; i < n; i += LANES) store(out + i, mul(mul(load(x + i), by), load(weight + i)));
}

// Halves (a | b) of a head become (a · cos - b · sin | b · cos + a · sin).
void rotate(float* head, const float* cosine, const float* sine, int dim) {
    for (int i = 0; i < dim / 2; i += LANES) {
        const F a = load(head + i), b = load(head + dim / 2 + i), c = load(cosine + i), s = load(sine + i);
        store(head + i, sub(mul(a, c), mul(b, s)));
        store(head + dim / 2 + i, fma(b, c, mul(a, s)));
    }
}

class Decoder {
    static constexpr int FEW = 4;  // tokens

   public:
    explicit Decoder(const Model& model)
        : m_(model), layers_(model.layer, model.layer + model.layers), team_(model.threads), thread_(model.threads) {
        note(m_.head);
        for (const Layer& layer : layers_)
            for (const Matrix* matrix : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) note(*matrix);
        heads_per_kv_ = m_.heads / m_.kv_heads;
        span_tokens_ = std::max(1, BLOCK_ROWS / heads_per_kv_);
        qkv_width_ = (m_.heads + 2 * m_.kv_heads) * m_.dim;
        for (Own& own : thread_) {
            own.line.resize(std::max(m_.hidden, m_.dim)), own.attention.fit(span_tokens_ * heads_per_kv_, m_.dim);
            own.product.fit();
            own.normed.reserve(FEW, m_.hidden, has_bf16_, has_quantised_);
        }
    }

    int run(const Step& step) {
        if (const int fault = check(step)) return fault;
        lay_out(step);
        expect(step.wanted_count);
        team_.run(8 * m_.layers + 3, [&](Team::Worker worker) {
            worker.each(step.tokens, 1 + step.tokens / 16, [&](int t) { read_row(m_.embedding, (int)step.ids[t], step.hidden + (size_t)t * m_.hidden); });
            for (int i = 0; i < m_.layers; i++) {
                attention_half(step, i, worker);
                feed_forward_half(step, layers_[i], worker);
            }
            logits(step.hidden, step.wanted, step.wanted_count, step.logits, worker);
            Registers::release();
        });
        if (step.wanted_count) choose(step);
        return FINE;
    }

    int head(const float* hidden, int rows, float* out) {
        if (rows < 1) return BAD_SHAPE;
        normed_.reserve(rows, m_.hidden, has_bf16_, has_quantised_);
        expect(rows);
        team_.run(2, [&](Team::Worker worker) {
            logits(hidden, nullptr, rows, out, worker);
            Registers::release();
        });
        return FINE;
    }

    // A token for each draw from its row of logits [rows][vocabulary].
    int draw(const Draw* draws, int count, const float* logits, int rows, int64_t* tokens) {
        if (count < 1 || !std::all_of(draws, draws + count, [&](const Draw& one) { return one.is_sound(rows, m_.vocabulary); })) return BAD_DRAW;
        for (Own& own : thread_) own.sampler.fit(m_.vocabulary);
        team_.run(1, [&](Team::Worker worker) {
            Sampler& sampler = thread_[worker.index].sampler;
            worker.each(count, 1, [&](int i) { tokens[i] = sampler.draw(logits + (size_t)draws[i].row * m_.vocabulary, draws[i]); });
        });
        return FINE;
    }

   private:
    struct Place {  // of a token
        int row, position;
    };
    struct Piece {  // of a chunk: tokens that attend together
        int first, tokens;
    };
    struct Best {  // of logits; of equals the first, in whatever order they are seen
        float value = -INFINITY;
        int index = 0;
        bool is_finite = true;
        void see(int column, const float* y, int count) {
            F most = all(-INFINITY), none = zero();
            for (int i = 0; i < count; i += LANES) {
                most = greatest(most, between(load(y + i), all(-INFINITY), 0, count - i));
                none = fma(between(load(y + i), zero(), 0, count - i), zero(), none);
            }
            is_finite = is_finite && sum(none) == 0;
            for (int i = 0; i < count && top(most) >= value; i++) merge({y[i], column + i, true});
        }
        void merge(const Best& other) {
            is_finite = is_finite && other.is_finite;
            if (other.value > value || (other.value == value && other.index < index)) value = other.value, index = other.index;
        }
    };
    struct Own {  // of a thread
        std::vector<Best> best;
        Lines<float> line;
        AttentionScratch attention;
        ProductScratch product;
        Buffer normed;
        Sampler sampler;
    };

    using Unseen = decltype([](int, int, const float*, int) {});

    void note(const Matrix& matrix) { (matrix.kind == BF16 ? has_bf16_ : has_quantised_) = true; }

    int check(const Step& step) const {
        if (step.tokens < 1 || step.rows < 1 || step.table_width < 1 || step.wanted_count < 0) return BAD_SHAPE;
        int64_t total = 0;
        for (int row = 0; row < step.rows; row++) {
            if (step.counts[row] < 1 || step.starts[row] < 0) return BAD_SHAPE;
            const int64_t end = (int64_t)step.starts[row] + step.counts[row];
            total += step.counts[row];
            if (end > m_.positions || end > (int64_t)step.table_width * m_.block) return BAD_POSITION;
            for (int64_t page = 0; page < (end + m_.block - 1) / m_.block; page++) {
                const int32_t at = step.table(row)[page];
                if (at < 0 || at >= m_.pages) return BAD_PAGE;
            }
        }
        if (total != step.tokens) return BAD_SHAPE;
        for (int t = 0; t < step.tokens; t++)
            if (step.ids[t] < 0 || step.ids[t] >= m_.vocabulary) return BAD_TOKEN;
        for (int i = 0; i < step.wanted_count; i++)
            if (step.wanted[i] < 0 || step.wanted[i] >= step.tokens) return BAD_PLACE;
        return FINE;
    }

    void lay_out(const Step& step) {
        places_.clear(), pieces_.clear(), early_.clear();
        for (int row = 0; row < step.rows; row++) {
            if (step.counts[row] > span_tokens_)
                for (int i = 0; i < step.counts[row]; i++) early_.push_back((int)places_.size() + i);
            for (int i = 0; i < step.counts[row]; i += span_tokens_)
                pieces_.push_back({(int)places_.size() + i, std::min(span_tokens_, step.counts[row] - i)});
            for (int i = 0; i < step.counts[row]; i++) places_.push_back({row, step.starts[row] + i});
        }
        const auto end = [&](const Piece& piece) { return places_[piece.first].position + piece.tokens; };
        std::stable_sort(pieces_.begin(), pieces_.end(), [&](const Piece& a, const Piece& b) { return end(a) > end(b); });  // long ones first
        const int tokens = step.tokens;
        normed_.reserve(std::max(tokens, step.wanted_count), m_.hidden, has_bf16_, has_quantised_);
        attended_.reserve(tokens, m_.heads * m_.dim, has_bf16_, has_quantised_);
        gated_.reserve(tokens, m_.width, has_bf16_, has_quantised_);
        if (qkv_.size() < (size_t)tokens * qkv_width_) qkv_.resize((size_t)tokens * qkv_width_);
        if (queries_.size() < (size_t)tokens * m_.heads * m_.dim) queries_.resize((size_t)tokens * m_.heads * m_.dim);
    }

    // All memory is taken here, before the team runs: an exception in one of its threads would end the process.
    void expect(int logits) {
        for (Own& own : thread_) own.best.assign(logits, Best{});
    }

    // Three turns for each thread: long enough that what is fetched ahead is its own, short enough for even ends.
    int run_of(int tasks) const { return std::min(32, (tasks + 3 * team_.size() - 1) / (3 * team_.size())); }

    // What `reader` is to multiply by. A few rows are sooner done by every thread for itself than waited for.
    Rows norm(const float* stream, const int32_t* which, int count, const float* weight, const Matrix& reader, Team::Worker& worker) {
        Own& own = thread_[worker.index];
        const Rows to = (count <= FEW ? own.normed : normed_).of(reader);
        const auto one = [&](int i) {
            normalise(stream + (size_t)(which ? which[i] : i) * m_.hidden, weight, m_.hidden, m_.epsilon, own.line.data());
            to.put(i, 0, own.line.data(), m_.hidden);
        };
        if (count > FEW) worker.each(count, 1 + count / 16, one);
        else for (int i = 0; i < count; i++) one(i);
        return to;
    }

    // out [rows][width] = W · x, or += with `adds`; see(row, column, y, count) is shown every piece.
    template <class See = Unseen>
    void multiply(const Matrix& w, const Rows& x, int rows, float* out, int width, bool adds, Team::Worker& worker, const See& see = {}) {
        const int pairs = w.pairs(), blocks = Range::blocks(x, rows);
        worker.each(blocks * pairs, run_of(blocks * pairs), [&](int task) {
            const int pair = task % pairs, column = pair * PAIR, kept = std::min(PAIR, width - column);
            outputs<1>(w, x, Range::of(task / pairs, blocks, rows), pair, thread_[worker.index].product, [&](int row, const float* y) {
                float* const to = out + (size_t)row * width + column;
                for (int j = 0; j < kept; j += LANES) {
                    const int lanes = std::min(LANES, kept - j);
                    store_some(to + j, adds ? add(load_some(to + j, lanes), load(y + j)) : load(y + j), lanes);
                }
                see(row, column, y, kept);
            });
        });
    }

    void attention_half(const Step& step, int index, Team::Worker& worker) {
        const Layer& layer = layers_[index];
        Cache cache{m_.pool, m_.kv_heads, m_.block, m_.dim, m_.int8_cache != 0};
        cache.pages += (size_t)index * m_.pages * cache.page_bytes();
        const Rows from = norm(step.hidden, nullptr, step.tokens, layer.attention_norm, layer.qkv, worker);
        multiply(layer.qkv, from, step.tokens, qkv_.data(), qkv_width_, false, worker);
        const int kv_heads = m_.kv_heads, early = (int)early_.size() * kv_heads;  // keys that more than one piece reads come first
        if (early) worker.each(early, 1 + early / 16, [&](int i) { turn_and_write(step, layer, cache, early_[i / kv_heads], i % kv_heads); });
        const Rows to = attended_.of(layer.out);
        worker.each((int)pieces_.size() * m_.kv_heads, 1, [&](int task) {
            const Piece piece = pieces_[task / m_.kv_heads];
            const int kv_head = task % m_.kv_heads, first_column = kv_head * heads_per_kv_ * m_.dim;
            const Place place = places_[piece.first];
            if (step.counts[place.row] <= span_tokens_)
                for (int t = piece.first; t < piece.first + piece.tokens; t++) turn_and_write(step, layer, cache, t, kv_head);
            const Span span{step.table(place.row), kv_head, place.position, piece.tokens,
                            &queries_[((size_t)kv_head * step.tokens + piece.first) * heads_per_kv_ * m_.dim], heads_per_kv_,
                            (int)layer.window, m_.attention_scale};
            attend(cache, span, thread_[worker.index].attention, [&](int row, const float* out) {
                to.put(piece.first + row / heads_per_kv_, first_column + row % heads_per_kv_ * m_.dim, out, m_.dim);
            });
        });
        multiply(layer.out, to, step.tokens, step.hidden, m_.hidden, true, worker);
    }

    // Of one token, for a KV head and the query heads that share it: norms where the architecture has them, rotation, the cache's write.
    void turn_and_write(const Step& step, const Layer& layer, const Cache& cache, int t, int kv_head) {
        const Place place = places_[t];
        const float *cosine = m_.cosine + (size_t)place.position * (m_.dim / 2), *sine = m_.sine + (size_t)place.position * (m_.dim / 2);
        float *const qkv = &qkv_[(size_t)t * qkv_width_], *key = qkv + (m_.heads + kv_head) * m_.dim;
        const auto turn = [&](float* head, const float* weight) {
            if (weight) normalise(head, weight, m_.dim, m_.epsilon, head);
            rotate(head, cosine, sine, m_.dim);
        };
        for (int head = kv_head * heads_per_kv_; head < (kv_head + 1) * heads_per_kv_; head++) {
            turn(qkv + head * m_.dim, layer.query_norm);
            Number* query = &queries_[(((size_t)kv_head * places_.size() + t) * heads_per_kv_ + head % heads_per_kv_) * m_.dim];
            for (int i = 0; i < m_.dim; i += LANES) store_bf16(query + i, load(qkv + head * m_.dim + i));
        }
        turn(key, layer.key_norm);
        cache.write(step.table(place.row), kv_head, place.position, key, key + m_.kv_heads * m_.dim);
    }

    void feed_forward_half(const Step& step, const Layer& layer, Team::Worker& worker) {
        const Rows from = norm(step.hidden, nullptr, step.tokens, layer.feed_forward_norm, layer.gate_up, worker), to = gated_.of(layer.down);
        const int pairs = m_.width / PAIR, blocks = Range::blocks(from, step.tokens);
        worker.each(blocks * pairs, run_of(blocks * pairs), [&](int task) {  // two pairs: 32 of gate and 32 of up
            const int pair = task % pairs;
            const Range range = Range::of(task / pairs, blocks, step.tokens);
            outputs<2>(layer.gate_up, from, range, 2 * pair, thread_[worker.index].product, [&](int row, const float* y) {
                float gated[PAIR];
                for (int half = 0; half < 2; half++)
                    store(gated + half * LANES, mul(silu(load(y + half * PAIR)), load(y + half * PAIR + LANES)));
                to.put(row, pair * PAIR, gated, PAIR);
            });
        });
        multiply(layer.down, to, step.tokens, step.hidden, m_.hidden, true, worker);
    }

    void logits(const float* hidden, const int32_t* which, int count, float* out, Team::Worker& worker) {
        if (!count) return;
        const Rows from = norm(hidden, which, count, m_.norm, m_.head, worker);
        std::vector<Best>& best = thread_[worker.index].best;
        multiply(m_.head, from, count, out, m_.vocabulary, false, worker,
                 [&](int row, int column, const float* y, int kept) { best[row].see(column, y, kept); });
    }

    // The best of what the threads have seen, each in its part of the vocabulary.
    void choose(const Step& step) const {
        for (int i = 0; i < step.wanted_count; i++) {
            Best best;
            for (const Own& own : thread_) best.merge(own.best[i]);
            step.best[i] = best.index, step.best_logits[i] = best.is_finite ? best.value : NAN;
        }
    }

    const Model m_;
    const std::vector<Layer> layers_;
    Team team_;
    std::vector<Own> thread_;
    bool has_bf16_ = false, has_quantised_ = false;
    int heads_per_kv_, span_tokens_, qkv_width_;
    std::vector<Place> places_;
    std::vector<Piece> pieces_;
    std::vector<int> early_;  // tokens of rows of several pieces
    Buffer normed_, attended_, gated_;
    Lines<float> qkv_;
    Lines<Number> queries_;
};

template <class Work>
int guarded(const Work& work) try { return work(); } catch (const std::exception&) { return NO_MEMORY; }

}  // namespace

extern "C" {

// A decoder over the model's memory, which the caller keeps; null when there is no memory or no thread to be had.
void* rantang_open(const Model* model) try { return new Decoder(*model); } catch (const std::exception&) { return nullptr; }

// 0, or a Fault: then nothing has been written.
int rantang_step(void* decoder, const Step* step) {
    return guarded([&] { return static_cast<Decoder*>(decoder)->run(*step); });
}

// Logits [rows][vocabulary] of hidden states [rows][H].
int rantang_logits(void* decoder, const float* hidden, int rows, float* out) {
    return guarded([&] { return static_cast<Decoder*>(decoder)->head(hidden, rows, out); });
}

// Tokens [count].
int rantang_draw(void* decoder, const Draw* draws, int count, const float* logits, int rows, int64_t* tokens) {
    return guarded([&] { return static_cast<Decoder*>(decoder)->draw(draws, count, logits, rows, tokens); });
}

void rantang_close(void* decoder) { delete static_cast<Decoder*>(decoder); }
}
