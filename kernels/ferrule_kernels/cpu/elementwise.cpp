// What a transformer's layer does between matrix products, each in one pass over its rows, for float32 and bfloat16.
//
// Arithmetic is float32, rounded to the rows' type where a composition of single operations would round. A row is
// computed by one thread, in one order: its result has the same bits alone and in any batch.
#include "recording.h"
#include "rows.h"

#include <algorithm>

namespace {

constexpr int64_t GRAIN = 1 << 15; // elements that are worth waking another thread for
constexpr int TOGETHER = WIDTH == 16 ? 4 : 2;  // vectors of a gate: what the registers have room for

}  // namespace

extern "C" {

// These are filled once, when a model is loaded: as in elementwise.py.

struct Norm {
    const void* weight;
    int64_t size;
    float eps, offset;  // the factor is weight + offset; with an offset it is not rounded before it is applied
};

struct Heads {
    const Norm *q_norm, *k_norm;  // of one head each, or null
    int64_t q_heads, k_heads, dim;
    int64_t turned;       // dims that are rotated, from the first
    int64_t interleaved;  // pairs are neighbours, not halves
};

struct Gate {
    int64_t size;
    float linear, cubic;  // act(x) = x * sigmoid(linear * x + cubic * x**3)
};

struct GatedNorm {
    const float* weight;  // of one part, or of all of them
    int64_t size, parts;  // numbers of a part, and parts of a token
    int64_t repeats;      // all parts have the same weight
    int64_t gate_first;
    float eps;
};
}

namespace {

template <class T> struct Rows {
    using Element = typename T::Element;

    // May be in place.
    static void norm(const Norm& n, const Element* x, Element* out) {
        Floats squares = {};
        for (int64_t i = 0; i < n.size; i += WIDTH) {
            const Floats v = read<T>(x + i, n.size - i);
            squares += v * v;
        }
        const float scale = 1.0f / std::sqrt(total(squares) / float(n.size) + n.eps);
        const auto* weight = (const Element*)n.weight;
        for (int64_t i = 0; i < n.size; i += WIDTH) {
            const Floats v = read<T>(x + i, n.size - i) * scale, w = read<T>(weight + i, n.size - i);
            write<T>(out + i, n.offset ? v * (w + n.offset) : T::round(v) * w, n.size - i);
        }
    }

    static void add(const Element* x, const Element* y, float scale, Element* out, int64_t size) {
        for (int64_t i = 0; i < size; i += WIDTH)
            write<T>(out + i, read<T>(x + i, size - i) + T::round(read<T>(y + i, size - i) * scale), size - i);
    }

    // Rotate one head in place by `cos` and `sin`, which have turned / 2 elements.
    static void rotate(const Heads& h, Element* x, const Element* cos, const Element* sin) {
        const int64_t half = h.turned / 2;
        if (h.interleaved) {
            for (int64_t i = 0; i < half; i += WIDTH) {
                Element first[WIDTH] = {}, second[WIDTH] = {};
                const int64_t count = std::min<int64_t>(WIDTH, half - i);
                for (int64_t j = 0; j < count; j++) first[j] = x[2 * (i + j)], second[j] = x[2 * (i + j) + 1];
                turn(first, second, cos + i, sin + i, count);
                for (int64_t j = 0; j < count; j++) x[2 * (i + j)] = first[j], x[2 * (i + j) + 1] = second[j];
            }
            return;
        }
        for (int64_t i = 0; i < half; i += WIDTH) turn(x + i, x + half + i, cos + i, sin + i, half - i);
    }

    static void turn(Element* first, Element* second, const Element* cos, const Element* sin, int64_t count) {
        const Floats a = read<T>(first, count), b = read<T>(second, count);
        const Floats c = read<T>(cos, count), s = read<T>(sin, count);
        write<T>(first, T::round(a * c) - T::round(b * s), count);
        write<T>(second, T::round(b * c) + T::round(a * s), count);
    }

    static void gate(const Gate& g, const Element* gate_up, Element* out) {
        int64_t i = 0;
        for (; i + TOGETHER * WIDTH <= g.size; i += TOGETHER * WIDTH) gate_some<TOGETHER>(g, gate_up, out, i, TOGETHER * WIDTH);
        for (; i < g.size; i += WIDTH) gate_some<1>(g, gate_up, out, i, g.size - i);
    }

    // N vectors from i on, or what there is of the last.
    template <int N> static void gate_some(const Gate& g, const Element* gate_up, Element* out, int64_t i, int64_t count) {
        Floats x[N], a[N];
        EACH(v, N) {
            x[v] = read<T>(gate_up + i + v * WIDTH, count - v * WIDTH);
            a[v] = x[v] * (g.linear + g.cubic * x[v] * x[v]);
        }
        gate_each(x, a);
        EACH(v, N) {
            const Floats up = read<T>(gate_up + g.size + i + v * WIDTH, count - v * WIDTH);
            write<T>(out + i + v * WIDTH, T::round(x[v]) * up, count - v * WIDTH);
        }
    }
};

template <class T> void norm_all(const Norm& n, const void* x, const void* y, float scale, void* sum, void* out, int64_t rows) {
    using Element = typename T::Element;
#pragma omp parallel for schedule(static) if (rows * n.size > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const auto* from = (const Element*)x + row * n.size;
        if (y) {
            auto* to = (Element*)sum + row * n.size;
            Rows<T>::add(from, (const Element*)y + row * n.size, scale, to, n.size);
            from = to;
        }
        Rows<T>::norm(n, from, (Element*)out + row * n.size);
    }
}

template <class T> void prepare_all(const Heads& h, void* x, int64_t stride, const void* cos, const void* sin, int64_t tokens) {
    using Element = typename T::Element;
    const int64_t half = h.turned / 2;
#pragma omp parallel for schedule(static) if (tokens * (h.q_heads + h.k_heads) * h.dim > GRAIN)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < h.q_heads + h.k_heads; head++) {
            auto* at = (Element*)x + token * stride + head * h.dim;
            const Norm* norm = head < h.q_heads ? h.q_norm : h.k_norm;
            if (norm) Rows<T>::norm(*norm, at, at);
            if (cos) Rows<T>::rotate(h, at, (const Element*)cos + token * half, (const Element*)sin + token * half);
        }
}

template <class T> void gate_all(const Gate& g, const void* gate_up, void* out, int64_t rows) {
    using Element = typename T::Element;
#pragma omp parallel for schedule(static) if (rows * g.size > GRAIN)
    for (int64_t row = 0; row < rows; row++)
        Rows<T>::gate(g, (const Element*)gate_up + row * 2 * g.size, (Element*)out + row * g.size);
}

// RMS norm of each part of x, times silu(z), which comes first with `gate_first`.
template <class T>
void gated_norm_all(const GatedNorm& n, const float* x, const void* z, int64_t stride, void* out, int64_t tokens) {
    using Element = typename T::Element;
#pragma omp parallel for schedule(static) if (tokens * n.parts * n.size > GRAIN)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t part = 0; part < n.parts; part++) {
            const int64_t at = part * n.size;
            const float *from = x + token * n.parts * n.size + at, *weight = n.weight + (n.repeats ? 0 : at);
            const auto* gate = (const Element*)z + token * stride + at;
            auto* to = (Element*)out + token * n.parts * n.size + at;
            const auto value = [&](int64_t i, Floats g) {
                const Floats v = read<F32>(from + i, n.size - i);
                return n.gate_first ? v * gated(g, g) : v;
            };
            Floats squares = {};
            for (int64_t i = 0; i < n.size; i += WIDTH) {
                const Floats v = value(i, read<T>(gate + i, n.size - i));
                squares += v * v;
            }
            const float scale = 1.0f / std::sqrt(total(squares) / float(n.size) + n.eps);
            for (int64_t i = 0; i < n.size; i += WIDTH) {
                const Floats g = read<T>(gate + i, n.size - i), w = read<F32>(weight + i, n.size - i);
                const Floats y = value(i, g) * scale * w;
                write<T>(to + i, n.gate_first ? y : y * gated(g, g), n.size - i);
            }
        }
}

}  // namespace

extern "C" {

// out = norm(x) for x [rows, size]; where y is not null, sum = x + scale * y and out = norm(sum).
void ferrule_norm_f32(const Norm* n, const void* x, const void* y, float scale, void* sum, void* out, int64_t rows) {
    recorded([=] { norm_all<F32>(*n, x, y, scale, sum, out, rows); });
}

void ferrule_norm_bf16(const Norm* n, const void* x, const void* y, float scale, void* sum, void* out, int64_t rows) {
    recorded([=] { norm_all<BF16>(*n, x, y, scale, sum, out, rows); });
}

// Normalise and rotate, in place, the queries and keys of x: tokens lie `stride` elements apart, heads follow each other.
// cos and sin [tokens, turned / 2], or null.
void ferrule_heads_f32(const Heads* h, void* x, int64_t stride, const void* cos, const void* sin, int64_t tokens) {
    recorded([=] { prepare_all<F32>(*h, x, stride, cos, sin, tokens); });
}

void ferrule_heads_bf16(const Heads* h, void* x, int64_t stride, const void* cos, const void* sin, int64_t tokens) {
    recorded([=] { prepare_all<BF16>(*h, x, stride, cos, sin, tokens); });
}

// out [rows, size] = act(gate) * up for gate_up [rows, 2 * size].
void ferrule_gate_f32(const Gate* g, const void* gate_up, void* out, int64_t rows) {
    recorded([=] { gate_all<F32>(*g, gate_up, out, rows); });
}

void ferrule_gate_bf16(const Gate* g, const void* gate_up, void* out, int64_t rows) {
    recorded([=] { gate_all<BF16>(*g, gate_up, out, rows); });
}

// out [tokens, parts * size] from float32 x of that shape and z, whose tokens lie `stride` elements apart.
void ferrule_gated_norm_f32(const GatedNorm* n, const float* x, const void* z, int64_t stride, void* out, int64_t tokens) {
    recorded([=] { gated_norm_all<F32>(*n, x, z, stride, out, tokens); });
}

void ferrule_gated_norm_bf16(const GatedNorm* n, const float* x, const void* z, int64_t stride, void* out, int64_t tokens) {
    recorded([=] { gated_norm_all<BF16>(*n, x, z, stride, out, tokens); });
}
}
