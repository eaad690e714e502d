/* The inner loops of the ring, for processors that have instructions for them (shared/ring/native.py).
 *
 * Every function computes exactly what its counterpart in torch does; tests compare them bit by bit.
 * Sizes and pointers are checked by the caller.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif

/* Of the functions' arguments; the same number stands in ring_native.py. */
int ring_version(void)
{
    return 2;
}

/* Whether so many floats, given by their bits, are numbers of less than a limit's size, given likewise. */
CLONES int ring_below(const uint32_t *bits, int64_t count, uint32_t limit)
{
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= (bits[i] & 0x7fffffffu) >= limit;
    return !found;
}

/* Whether ring_multiply runs here. */
int ring_can_multiply(void)
{
#ifdef VNNI
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

#ifdef VNNI

enum {
    PANEL = 32,              /* columns at once: two vectors of sums */
    ROWS = 3,                /* rows at once: with four digits and two vectors, 24 of 32 registers */
    PACKED = 256 << 10,      /* bytes of weight that a core works on, in its own cache */
    ROW_BLOCK = 192 << 10,   /* bytes of rows likewise */
    ROW_BUFFER = 8 << 20,    /* bytes of rows in all */
    FEW = 16,                /* rows that are multiplied without packing the weight */
    SMALL = 1 << 20          /* bytes of weight, times rows, for which a second thread is not woken */
};

/* Bytes of each four neighbouring integers, digit by digit: the unsigned base-256 digits of r. */
VNNI static void split_row(const int32_t *row, int64_t inner, uint8_t *out)
{
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int64_t k = 0; k < inner; k += 16) {
        __mmask16 there = inner - k >= 16 ? 0xFFFF : (__mmask16)((1u << (inner - k)) - 1);
        int64_t groups = (inner - k + 3) / 4;
        __mmask16 written = groups >= 4 ? 0xFFFF : (__mmask16)((1u << 4 * groups) - 1);
        __m512i four = _mm512_shuffle_epi8(_mm512_maskz_loadu_epi32(there, row + k), order);
        _mm512_mask_storeu_epi32(out + 4 * k, written, four);
    }
}

/* 32 columns of the weight as [inner / 4][32][4], zeros beyond its ends. Weight [columns, inner]. */
VNNI static void pack_rows(const int8_t *weight, int64_t stride, int64_t inner, int64_t columns, int8_t *out)
{
    const __m512i steps = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32((int)stride));
    for (int half = 0; half < 2; half++) {
        int64_t first = 16 * half;
        int64_t left = columns - first;
        __mmask16 there = left >= 16 ? 0xFFFF : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
        const int8_t *from = weight + first * stride;
        int64_t k = 0;
        for (; k + 4 <= inner; k += 4) {
            __m512i dwords = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, steps, from + k, 1);
            _mm512_storeu_si512(out + 32 * k + 64 * half, dwords);
        }
        if (k < inner) {
            int8_t *rest = out + 32 * k + 64 * half;
            memset(rest, 0, 64);
            for (int64_t n = 0; n < 16 && n < left; n++)
                memcpy(rest + 4 * n, from + n * stride + k, (size_t)(inner - k));
        }
    }
}

/* The same for a weight [inner, columns]. */
VNNI static void pack_columns(const int8_t *weight, int64_t stride, int64_t inner, int64_t columns, int8_t *out)
{
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __mmask32 there = columns >= 32 ? 0xFFFFFFFF : (1u << columns) - 1;
    for (int64_t k = 0; k < inner; k += 4) {
        __m256i row[4];
        for (int j = 0; j < 4; j++)
            row[j] = k + j < inner ? _mm256_maskz_loadu_epi8(there, weight + (k + j) * stride)
                                   : _mm256_setzero_si256();
        for (int half = 0; half < 2; half++) {
            /* Four rows of 16 bytes in one register; then its 4 x 4 blocks of bytes are transposed. */
            __m512i all = _mm512_castsi128_si512(_mm256_castsi256_si128(row[0]));
            all = _mm512_inserti32x4(all, _mm256_castsi256_si128(row[1]), 1);
            all = _mm512_inserti32x4(all, _mm256_castsi256_si128(row[2]), 2);
            all = _mm512_inserti32x4(all, _mm256_castsi256_si128(row[3]), 3);
            all = _mm512_permutexvar_epi32(lanes, all);
            const __m512i order = _mm512_broadcast_i32x4(
                _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
            _mm512_storeu_si512(out + 32 * k + 64 * half, _mm512_shuffle_epi8(all, order));
            for (int j = 0; j < 4; j++)
                row[j] = _mm256_castsi128_si256(_mm256_extracti128_si256(row[j], 1));
        }
    }
}

/* Three rows times one panel: sums of four digits each, put together in registers. Fewer rows are
 * padded by repeating the last, whose sums are then not stored. Compilers keep named variables in
 * registers, but not an array of this size, hence the macros.
 */
#define DIGITS(DO, row) DO(row, 0) DO(row, 1) DO(row, 2) DO(row, 3)
#define SUMS(DO) DIGITS(DO, 0) DIGITS(DO, 1) DIGITS(DO, 2)
#define ZERO(row, digit) \
    __m512i left_##row##_##digit = _mm512_setzero_si512(), right_##row##_##digit = _mm512_setzero_si512();
#define ADD(row, digit)                                                              \
    memcpy(&four, row_##row + 16 * g + 4 * digit, 4);                                \
    spread = _mm512_set1_epi32(four);                                                \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(left_##row##_##digit) : "v"(spread), "v"(left));   \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(right_##row##_##digit) : "v"(spread), "v"(right));
#define WEIGH(side, row)                                                          \
    _mm512_add_epi32(                                                             \
        _mm512_add_epi32(side##_##row##_0, _mm512_slli_epi32(side##_##row##_1, 8)), \
        _mm512_add_epi32(_mm512_slli_epi32(side##_##row##_2, 16), _mm512_slli_epi32(side##_##row##_3, 24)))
#define STORE(row)                                                                        \
    if (row < count) {                                                                    \
        _mm512_mask_storeu_epi32(out + row * out_stride, first, WEIGH(left, row));        \
        _mm512_mask_storeu_epi32(out + row * out_stride + 16, second, WEIGH(right, row)); \
    }

VNNI static void multiply_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int8_t *panel,
                               int64_t groups, int32_t *out, int64_t out_stride, int64_t columns)
{
    const uint8_t *row_0 = rows, *row_1 = count > 1 ? row_0 + row_bytes : row_0,
                  *row_2 = count > 2 ? row_1 + row_bytes : row_1;
    __mmask16 first = columns >= 16 ? 0xFFFF : (__mmask16)((1u << columns) - 1);
    __mmask16 second = columns >= 32 ? 0xFFFF : columns <= 16 ? 0 : (__mmask16)((1u << (columns - 16)) - 1);
    __m512i spread;
    int32_t four;
    SUMS(ZERO)
    for (int64_t g = 0; g < groups; g++) {
        __m512i left = _mm512_load_si512(panel + 128 * g), right = _mm512_load_si512(panel + 128 * g + 64);
        SUMS(ADD)
    }
    STORE(0)
    STORE(1)
    STORE(2)
}

VNNI static void multiply_block(const uint8_t *rows, int64_t count, int64_t row_bytes, const int8_t *packed,
                                int64_t panels, int64_t groups, int32_t *out, int64_t out_stride,
                                int64_t columns)
{
    for (int64_t p = 0; p < panels; p++)
        for (int64_t t = 0; t < count; t += ROWS)
            multiply_rows(rows + t * row_bytes, count - t, row_bytes, packed + p * groups * 128, groups,
                          out + t * out_stride + p * PANEL, out_stride, columns - p * PANEL);
}

/* Few rows: every weight is read once, in the order in which it lies in memory, which is the limit. */

/* The digits of a row, each in a stretch of its own: [4][padded]. */
VNNI static void separate_row(const int32_t *row, int64_t inner, int64_t padded, uint8_t *out)
{
    for (int64_t k = 0; k < padded; k += 16) {
        __mmask16 there = inner - k >= 16 ? 0xFFFF : inner <= k ? 0 : (__mmask16)((1u << (inner - k)) - 1);
        __m512i integers = _mm512_maskz_loadu_epi32(there, row + k);
        for (int i = 0; i < 4; i++)
            _mm_store_si128((__m128i *)(out + i * padded + k),
                            _mm512_cvtepi32_epi8(_mm512_srli_epi32(integers, 8 * i)));
    }
}

#define COLUMNS(DO, digit) DO(digit, 0) DO(digit, 1) DO(digit, 2) DO(digit, 3)
#define PRODUCTS(DO) COLUMNS(DO, 0) COLUMNS(DO, 1) COLUMNS(DO, 2) COLUMNS(DO, 3)
#define CLEAR(digit, column) __m512i sum_##digit##_##column = _mm512_setzero_si512();
#define MULTIPLY(digit, column) \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum_##digit##_##column) : "v"(bytes_##digit), "v"(weight_##column));
#define TOTAL(column)                                                                              \
    _mm512_reduce_add_epi32(_mm512_add_epi32(                                                      \
        _mm512_add_epi32(sum_0_##column, _mm512_slli_epi32(sum_1_##column, 8)),                    \
        _mm512_add_epi32(_mm512_slli_epi32(sum_2_##column, 16), _mm512_slli_epi32(sum_3_##column, 24))))

/* One row times four columns of a weight [columns, inner]; fewer are padded by repeating the first. */
VNNI static void dot_four(const uint8_t *row, int64_t padded, const int8_t *weight, int64_t stride,
                          int64_t columns, int64_t inner, int32_t *out)
{
    const int8_t *column_0 = weight, *column_1 = columns > 1 ? weight + stride : weight,
                 *column_2 = columns > 2 ? weight + 2 * stride : weight,
                 *column_3 = columns > 3 ? weight + 3 * stride : weight;
    PRODUCTS(CLEAR)
    for (int64_t k = 0; k < inner; k += 64) {
        __mmask64 there = inner - k >= 64 ? ~0ull : (1ull << (inner - k)) - 1;
        __m512i weight_0 = _mm512_maskz_loadu_epi8(there, column_0 + k),
                weight_1 = _mm512_maskz_loadu_epi8(there, column_1 + k),
                weight_2 = _mm512_maskz_loadu_epi8(there, column_2 + k),
                weight_3 = _mm512_maskz_loadu_epi8(there, column_3 + k);
        __m512i bytes_0 = _mm512_load_si512(row + k), bytes_1 = _mm512_load_si512(row + padded + k),
                bytes_2 = _mm512_load_si512(row + 2 * padded + k),
                bytes_3 = _mm512_load_si512(row + 3 * padded + k);
        PRODUCTS(MULTIPLY)
    }
    int32_t totals[4] = {TOTAL(0), TOTAL(1), TOTAL(2), TOTAL(3)};
    memcpy(out, totals, 4 * (size_t)(columns > 4 ? 4 : columns));
}

VNNI static int dot(const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner, const int8_t *weight,
                    int64_t weight_stride, int64_t columns, int32_t *out, int64_t out_stride, int threads)
{
    int64_t padded = (inner + 63) / 64 * 64;
    uint8_t *separate = aligned_alloc(64, (size_t)(count * 4 * padded));
    if (separate == NULL)
        return 1;
    for (int64_t t = 0; t < count; t++)
        separate_row(rows + t * row_stride, inner, padded, separate + t * 4 * padded);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t four = 0; four < (columns + 3) / 4; four++)
        for (int64_t t = 0; t < count; t++)
            dot_four(separate + t * 4 * padded, padded, weight + 4 * four * weight_stride, weight_stride,
                     columns - 4 * four, inner, out + t * out_stride + 4 * four);
    free(separate);
    return 0;
}

/* out [count, columns] = rows [count, inner] times the weight, modulo 2^32.
 *
 * The weight is [columns, inner] if by_rows, else [inner, columns]; strides are in elements, and the
 * elements of a row lie side by side. 0, or 1 if there is no memory.
 */
int ring_multiply(const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner, const int8_t *weight,
                  int64_t weight_stride, int by_rows, int64_t columns, int32_t *out, int64_t out_stride,
                  int threads)
{
    if (by_rows && count <= FEW)
        return dot(rows, row_stride, count, inner, weight, weight_stride, columns, out, out_stride,
                   count * columns * inner < SMALL ? 1 : threads);
    int64_t groups = (inner + 3) / 4, row_bytes = 16 * groups;
    int64_t panels = PACKED / (groups * 128);
    panels = panels < 1 ? 1 : panels > 8 ? 8 : panels;
    /* Enough blocks for all threads. */
    while (panels > 1 && (columns + PANEL * panels - 1) / (PANEL * panels) < 2 * threads)
        panels--;
    int64_t blocks = (columns + PANEL * panels - 1) / (PANEL * panels);
    int64_t chunk = ROW_BUFFER / row_bytes, step = ROW_BLOCK / row_bytes / ROWS * ROWS;
    chunk = chunk < 96 ? 96 : chunk;
    chunk = chunk > count ? count : chunk;
    step = step < ROWS ? ROWS : step;
    uint8_t *split = aligned_alloc(64, (size_t)((chunk * row_bytes + 63) / 64 * 64));
    int failed = split == NULL;
    for (int64_t first = 0; first < count && !failed; first += chunk) {
        int64_t here = count - first < chunk ? count - first : chunk;
#pragma omp parallel num_threads(threads)
        {
            int8_t *packed = aligned_alloc(64, (size_t)(panels * groups * 128));
            if (packed == NULL)
                failed = 1;
#pragma omp for schedule(static)
            for (int64_t t = 0; t < here; t++)
                split_row(rows + (first + t) * row_stride, inner, split + t * row_bytes);
#pragma omp for schedule(dynamic)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t at = block * panels * PANEL;
                int64_t wide = columns - at < panels * PANEL ? columns - at : panels * PANEL;
                int64_t used = (wide + PANEL - 1) / PANEL;
                if (packed == NULL)
                    continue;
                for (int64_t p = 0; p < used; p++) {
                    int64_t column = at + p * PANEL;
                    if (by_rows)
                        pack_rows(weight + column * weight_stride, weight_stride, inner, columns - column,
                                  packed + p * groups * 128);
                    else
                        pack_columns(weight + column, weight_stride, inner, columns - column,
                                     packed + p * groups * 128);
                }
                for (int64_t t = 0; t < here; t += step)
                    multiply_block(split + t * row_bytes, here - t < step ? here - t : step, row_bytes, packed,
                                   used, groups, out + (first + t) * out_stride + at, out_stride, wide);
            }
            free(packed);
        }
    }
    free(split);
    return failed;
}

#else

int ring_multiply(const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner, const int8_t *weight,
                  int64_t weight_stride, int by_rows, int64_t columns, int32_t *out, int64_t out_stride,
                  int threads)
{
    return 1;
}

#endif

/* Float rows to integers under masks.
 *
 * One row is its blocks side by side, times scales if there are any (NULL: none). exponents[t] becomes an
 * e with |x| / 2^e <= room, and round(x / 2^e) is added to requests[t], which holds the mask. With a
 * factor, expected[t] = sum round(x / 2^e) * factor, modulo 2^64. 0, or 1 if a norm is not finite.
 */
CLONES static int hide_rows(const float *const *blocks, const int64_t *widths, int64_t parts, int64_t columns,
                            int64_t first, int64_t last, const float *scales, double over_room,
                            const int64_t *factor, int32_t *requests, int32_t *exponents, uint64_t *expected)
{
    for (int64_t t = first; t < last; t++) {
        double squares = 0;
        int64_t at = 0;
        for (int64_t b = 0; b < parts; at += widths[b++]) {
            const float *x = blocks[b] + t * widths[b];
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < widths[b]; i++) {
                double value = scales ? x[i] * scales[at + i] : x[i];
                squares += value * value;
            }
        }
        double norm = sqrt(squares);
        if (!isfinite(norm))
            return 1;
        int power = 0;
        frexp(norm * over_room, &power);
        exponents[t] = power;
        double scale = ldexp(1.0, -power);
        uint64_t sum = 0;
        at = 0;
        for (int64_t b = 0; b < parts; at += widths[b++]) {
            const float *x = blocks[b] + t * widths[b];
            int32_t *out = requests + t * columns + at;
            for (int64_t i = 0; i < widths[b]; i++) {
                double value = scales ? x[i] * scales[at + i] : x[i];
                int64_t integer = (int32_t)rint(value * scale);
                out[i] = (int32_t)((uint32_t)out[i] + (uint32_t)integer);
                if (factor)
                    sum += (uint64_t)integer * (uint64_t)factor[at + i];
            }
        }
        if (factor)
            expected[t] = sum;
    }
    return 0;
}

int ring_hide(const float *const *blocks, const int64_t *widths, int64_t parts, int64_t columns, int64_t rows,
              const float *scales, double over_room, const int64_t *factor, int32_t *requests,
              int32_t *exponents, uint64_t *expected, int threads)
{
    int failed = 0;
    int64_t step = (rows + 4 * threads - 1) / (4 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : failed) if (threads > 1)
    for (int64_t first = 0; first < rows; first += step)
        failed |= hide_rows(blocks, widths, parts, columns, first, first + step < rows ? first + step : rows,
                            scales, over_room, factor, requests, exponents, expected);
    return failed;
}

/* Answers to float rows: effects off, checked, and 2^e s (u1 + u2 / 256) written.
 *
 * A row of answers holds the products with the first plane, half of it, then those with the second;
 * effects likewise. With a challenge, sum u * challenge must be expected[t], modulo 2^64. How many rows
 * are wrong.
 */
CLONES static int64_t reveal_rows(int32_t *answers, const int32_t *const *effects, int64_t sources, int64_t half,
                                  int64_t first, int64_t last, const int32_t *exponents, const float *scales,
                                  float *const *blocks, const int64_t *widths, int64_t parts,
                                  const int32_t *challenge, const uint64_t *expected)
{
    int64_t wrong = 0;
    for (int64_t t = first; t < last; t++) {
        int32_t *u1 = answers + t * 2 * half, *u2 = u1 + half;
        for (int64_t k = 0; k < sources; k++) {
            const int32_t *effect = effects[k] + t * 2 * half;
            for (int64_t i = 0; i < 2 * half; i++)
                u1[i] = (int32_t)((uint32_t)u1[i] - (uint32_t)effect[i]);
        }
        if (challenge) {
            int64_t sum = 0;
            for (int64_t i = 0; i < 2 * half; i++)
                sum = (int64_t)((uint64_t)sum + (uint64_t)((int64_t)u1[i] * (int64_t)challenge[i]));
            wrong += (uint64_t)sum != expected[t];
        }
        int64_t at = 0;
        int near = exponents[t] > -64 && exponents[t] < 64;
        float scale = near ? ldexpf(1.0f, exponents[t]) : 0.0f;
        double far_scale = ldexp(1.0, exponents[t]);
        for (int64_t b = 0; b < parts; at += widths[b++]) {
            float *out = blocks[b] + t * widths[b];
            const int32_t *a = u1 + at, *c = u2 + at;
            const float *s = scales ? scales + at : NULL;
            if (near && s)
                for (int64_t i = 0; i < widths[b]; i++)
                    out[i] = ((float)c[i] * 0.00390625f + (float)a[i]) * s[i] * scale;
            else if (near)
                for (int64_t i = 0; i < widths[b]; i++)
                    out[i] = ((float)c[i] * 0.00390625f + (float)a[i]) * scale;
            else
                for (int64_t i = 0; i < widths[b]; i++)
                    out[i] = (float)(((double)c[i] * 0.00390625 + (double)a[i]) * (s ? s[i] : 1.0f) * far_scale);
        }
    }
    return wrong;
}

int64_t ring_reveal(int32_t *answers, const int32_t *const *effects, int64_t sources, int64_t half, int64_t rows,
                    const int32_t *exponents, const float *scales, float *const *blocks, const int64_t *widths,
                    int64_t parts, const int32_t *challenge, const uint64_t *expected, int threads)
{
    int64_t wrong = 0, step = (rows + 4 * threads - 1) / (4 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : wrong) if (threads > 1)
    for (int64_t first = 0; first < rows; first += step)
        wrong += reveal_rows(answers, effects, sources, half, first, first + step < rows ? first + step : rows,
                             exponents, scales, blocks, widths, parts, challenge, expected);
    return wrong;
}
