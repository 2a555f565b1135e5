// out[m][n] = sum over k of x[m][k] * w[n][k], all bfloat16, for few rows x and many rows w.
//
// A decode step reads every weight once and multiplies it with a handful of rows: the memory is the limit, and must stay
// the limit while there are more rows than one. So each pair of weight rows is widened in registers, once for four rows
// of x, and never written anywhere. Compiled for AVX2 and FMA; k is a multiple of 16.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#define LOW(v) _mm256_castsi256_ps(_mm256_slli_epi32(v, 16))
#define HIGH(v) _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)))

static inline float total(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline uint16_t rounded(float value) {
    union { float f; uint32_t u; } bits = {value};
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits.u + 0x7fff + ((bits.u >> 16) & 1)) >> 16);
}

// x holds, for every 16 features, the even ones and then the odd ones: the order in which weights are widened.
static inline __attribute__((always_inline)) void block(
    const float *x, long k, const uint16_t *w0, const uint16_t *w1, int rows, const float *bias, uint16_t *out, long n) {
    __m256 a[4], b[4];
    for (int m = 0; m < rows; m++) a[m] = b[m] = _mm256_setzero_ps();
    for (long i = 0; i < k; i += 16) {
        const __m256i p = _mm256_loadu_si256((const __m256i *)(w0 + i));
        const __m256i q = _mm256_loadu_si256((const __m256i *)(w1 + i));
        const __m256 p0 = LOW(p), p1 = HIGH(p), q0 = LOW(q), q1 = HIGH(q);
        _mm_prefetch((const char *)(w0 + i + 512), _MM_HINT_T0);
        _mm_prefetch((const char *)(w1 + i + 512), _MM_HINT_T0);
        for (int m = 0; m < rows; m++) {
            const __m256 even = _mm256_loadu_ps(x + m * k + i), odd = _mm256_loadu_ps(x + m * k + i + 8);
            a[m] = _mm256_fmadd_ps(p1, odd, _mm256_fmadd_ps(p0, even, a[m]));
            b[m] = _mm256_fmadd_ps(q1, odd, _mm256_fmadd_ps(q0, even, b[m]));
        }
    }
    for (int m = 0; m < rows; m++) {
        out[m * n] = rounded(total(a[m]) + (bias ? bias[0] : 0));
        if (w1 != w0) out[m * n + 1] = rounded(total(b[m]) + (bias ? bias[1] : 0));
    }
}

// x is [rows][k], w is [n][k], bias is [n] in float32, or null, out is [rows][n]. Returns 0, or 1 without memory.
int belayer_narrow_linear(
    const uint16_t *input, long rows, const uint16_t *w, long n, long k, const float *bias, uint16_t *out) {
    float *x = malloc(sizeof(float) * rows * k);
    if (!x) return 1;
    for (long i = 0; i < rows * k; i += 16) {
        const __m256i v = _mm256_loadu_si256((const __m256i *)(input + i));
        _mm256_storeu_ps(x + i, LOW(v));
        _mm256_storeu_ps(x + i + 8, HIGH(v));
    }
#pragma omp parallel for schedule(static)
    for (long pair = 0; pair < (n + 1) / 2; pair++) {
        const long j = 2 * pair;
        const uint16_t *w0 = w + j * k, *w1 = j + 1 < n ? w0 + k : w0;
        const float *shift = bias ? bias + j : 0;
        for (long m = 0; m < rows; m += 4) {
            const float *part = x + m * k;
            uint16_t *to = out + m * n + j;
            switch (rows - m) {
                case 1: block(part, k, w0, w1, 1, shift, to, n); break;
                case 2: block(part, k, w0, w1, 2, shift, to, n); break;
                case 3: block(part, k, w0, w1, 3, shift, to, n); break;
                default: block(part, k, w0, w1, 4, shift, to, n);
            }
        }
    }
    free(x);
    return 0;
}
