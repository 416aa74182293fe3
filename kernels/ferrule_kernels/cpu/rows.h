// Rows of float32 or bfloat16 that are computed with as vectors of floats, and what several kernels do to them.
#pragma once
#include "vectors.h"

namespace {

struct F32 {
    using Element = float;
    static inline Floats load(const Element* from) { return ::load<Floats>(from); }
    static inline void store(Element* to, Floats x) { std::memcpy(to, &x, sizeof x); }
    static inline Floats round(Floats x) { return x; }
};

struct BF16 {
    using Element = uint16_t;
    static inline Floats load(const Element* from) { return widen(from); }
    static inline void store(Element* to, Floats x) { narrow(to, x); }
    static inline Floats round(Floats x) { return (Floats)rounded_bits(x); }
};

// A vector of which only the first `count` elements may exist; the others are zero.
template <class T> inline Floats read(const typename T::Element* from, int64_t count) {
    if (count >= WIDTH) return T::load(from);
    typename T::Element some[WIDTH] = {};
    std::memcpy(some, from, count * sizeof *some);
    return T::load(some);
}

template <class T> inline void write(typename T::Element* to, Floats x, int64_t count) {
    if (count >= WIDTH) return T::store(to, x);
    typename T::Element some[WIDTH];
    T::store(some, x);
    std::memcpy(to, some, count * sizeof *some);
}

// Each x becomes x * sigmoid(a), of which the second is never computed from e**x that overflows.
template <int N> inline void gate_each(Floats (&x)[N], const Floats (&a)[N]) {
    Floats e[N];
    EACH(i, N) e[i] = a[i] < 0.0f ? a[i] : -a[i];
    exponentials(e);
    EACH(i, N) x[i] = x[i] * (a[i] < 0.0f ? e[i] : splat(1.0f)) / (1.0f + e[i]);
}

inline Floats gated(Floats x, Floats a) {
    Floats all[1] = {x};
    gate_each(all, {a});
    return all[0];
}

}  // namespace
