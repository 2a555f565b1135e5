// out[m][n] = sum over k of x[m][k] * w[n][k], all bfloat16, summed in float32 and rounded once.
//
// A tile is four rows of x by three rows of w: its twelve sums stay in registers, and w is widened there and never
// written anywhere. With few rows of x, as when decoding, the memory that holds w is the limit; with many, as when
// prefilling, arithmetic is. The order of a sum depends on nothing but k, so a row of the result is the same, to the
// bit, whatever rows are computed beside it. Compiled for AVX2 and FMA; k is a multiple of 16.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

enum { ROWS = 4, OUTPUTS = 3 };
enum { CHUNK = 192 << 10 };  // bytes of w that all rows are multiplied with before the next ones: they fit a level-2 cache

static const uint32_t UPPER_HALF[8] __attribute__((aligned(32))) = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// Of sixteen elements, those at even places.
static inline __m256 even(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }

// Those at odd places. The mask is taken from memory: in a register of its own it would drive a sum out of another.
static inline __m256 odd(__m256i v) {
    __m256 result;
    __asm__("vandps %2, %1, %0" : "=x"(result) : "x"(v), "m"(UPPER_HALF));
    return result;
}

static inline __m256i load(const uint16_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

// The sums of the eight lanes of each of four vectors.
static inline __m128 totals(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// The nearest bfloat16, of two equally near ones the even one; in the lower half of each lane.
static inline __m128i rounded(__m128 values) {
    const __m128i bits = _mm_castps_si128(values);
    const __m128i last = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    const __m128i near = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(last, _mm_set1_epi32(0x7fff))), 16);
    const __m128i not_a_number = _mm_castps_si128(_mm_cmpunord_ps(values, values));
    return _mm_blendv_epi8(near, _mm_set1_epi32(0x7fc0), not_a_number);
}

// x holds, for every sixteen features, those at even places and then those at odd ones: the order of even() and odd().
static inline __attribute__((always_inline)) void tile(
    const float *x, const uint16_t *w, long k, int rows, int outputs, const float *bias, uint16_t *out, long n) {
    __m256 sums[ROWS][OUTPUTS], v[OUTPUTS];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int j = 0; j < outputs; j++) sums[m][j] = _mm256_setzero_ps();
    for (long i = 0; i < k; i += 16) {
#pragma GCC unroll 3
        for (int j = 0; j < outputs; j++) {
            v[j] = even(load(w + j * k + i));
            _mm_prefetch((const char *)(w + j * k + i + 512), _MM_HINT_T0);
        }
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const __m256 features = _mm256_loadu_ps(x + m * k + i);
#pragma GCC unroll 3
            for (int j = 0; j < outputs; j++) sums[m][j] = _mm256_fmadd_ps(v[j], features, sums[m][j]);
        }
#pragma GCC unroll 3
        for (int j = 0; j < outputs; j++) v[j] = odd(load(w + j * k + i));
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const __m256 features = _mm256_loadu_ps(x + m * k + i + 8);
#pragma GCC unroll 3
            for (int j = 0; j < outputs; j++) sums[m][j] = _mm256_fmadd_ps(v[j], features, sums[m][j]);
        }
    }
    const __m256 none = _mm256_setzero_ps();
#pragma GCC unroll 3
    for (int j = 0; j < outputs; j++) {
        const __m128 sum = totals(
            sums[0][j], rows > 1 ? sums[1][j] : none, rows > 2 ? sums[2][j] : none, rows > 3 ? sums[3][j] : none);
        const __m128i values = rounded(_mm_add_ps(sum, _mm_set1_ps(bias ? bias[j] : 0)));
        out[j] = (uint16_t)_mm_extract_epi16(values, 0);
        if (rows > 1) out[n + j] = (uint16_t)_mm_extract_epi16(values, 2);
        if (rows > 2) out[2 * n + j] = (uint16_t)_mm_extract_epi16(values, 4);
        if (rows > 3) out[3 * n + j] = (uint16_t)_mm_extract_epi16(values, 6);
    }
}

// One function per width, so that the loops over outputs have no tail to test for.
#define TILES_OF(width)                                                                                               \
    static void tiles_of_##width(                                                                                     \
        const float *x, const uint16_t *w, long k, long rows, const float *bias, uint16_t *out, long n) {             \
        switch (rows) {                                                                                               \
            case 1: tile(x, w, k, 1, width, bias, out, n); break;                                                     \
            case 2: tile(x, w, k, 2, width, bias, out, n); break;                                                     \
            case 3: tile(x, w, k, 3, width, bias, out, n); break;                                                     \
            default: tile(x, w, k, 4, width, bias, out, n);                                                           \
        }                                                                                                             \
    }
TILES_OF(1)
TILES_OF(2)
TILES_OF(3)

// x is [rows][k], w is [n][k], bias is [n] in float32, or null, out is [rows][n]. Returns 0, or 1 without memory.
int belayer_bfloat16_linear(
    const uint16_t *input, long rows, const uint16_t *w, long n, long k, const float *bias, uint16_t *out) {
    float *x = malloc(sizeof(float) * rows * k);
    if (!x) return 1;
    long width = CHUNK / 2 / k / OUTPUTS * OUTPUTS;
    if (width < OUTPUTS) width = OUTPUTS;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long m = 0; m < rows; m++)
            for (long i = m * k; i < (m + 1) * k; i += 16) {
                const __m256i v = load(input + i);
                _mm256_storeu_ps(x + i, even(v));
                _mm256_storeu_ps(x + i + 8, odd(v));
            }
#pragma omp for schedule(static)
        for (long chunk = 0; chunk < (n + width - 1) / width; chunk++) {
            const long first = chunk * width, last = first + width < n ? first + width : n;
            for (long m = 0; m < rows; m += ROWS)
                for (long j = first; j < last; j += OUTPUTS) {
                    const float *shift = bias ? bias + j : 0;
                    switch (last - j) {
                        case 1: tiles_of_1(x + m * k, w + j * k, k, rows - m, shift, out + m * n + j, n); break;
                        case 2: tiles_of_2(x + m * k, w + j * k, k, rows - m, shift, out + m * n + j, n); break;
                        default: tiles_of_3(x + m * k, w + j * k, k, rows - m, shift, out + m * n + j, n);
                    }
                }
        }
    }
    free(x);
    return 0;
}
