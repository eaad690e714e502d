/* Products of the ring: int32 rows times an int16 or int8 weight, modulo 2^32 (shared/ring/native.py).
 *
 * r = lo + 2^16 hi with signed halves of 16 bits, so that r w = lo w + 2^16 (hi w): two products of 16 bits, for
 * which all processors have an instruction that adds up two of them at once. Sums wrap, as they should. Every
 * function computes exactly what its counterpart in torch does. Sizes and pointers are checked by the caller.
 */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    PANEL = 48,      /* columns that are packed together: a whole number of every tile's */
    DEPTH = 1024,    /* of the inner size at once, so that a panel stays in a core's own cache */
    ROWS = 480,      /* at once, so that they stay there too; a whole number of every tile's */
    AHEAD = 16,      /* rows of a weight that are fetched before they are needed */
    FEW = 16,        /* rows that are multiplied without packing the weight, if that is by_rows */
    FEW_COLUMNS = 4, /* else */
    STRIP = 1024,    /* columns at once then */
    SMALL = 1 << 20  /* products for which a second thread is not woken */
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m128i sum4(__m128i a, __m128i b, __m128i c, __m128i d)
{
    return _mm_hadd_epi32(_mm_hadd_epi32(a, b), _mm_hadd_epi32(c, d));
}

AVX2 static inline __m128i fold8(__m256i v)
{
    return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

#define FOUR __m128i
/* Written out, so that sums stay in registers: compilers would compute many products before they add them up. */
#define ADD_PRODUCTS(s, a, b, registers)                      \
    {                                                         \
        VEC product;                                          \
        __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"    \
                : "+" registers(s), "=&" registers(product)   \
                : registers(a), registers(b));                \
    }

/* AVX-512, with and without its instruction for sums of products. */
#define VEC __m512i
#define LANES 16
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3)
#define EACH_VECTOR(DO, t) DO(t, 0) DO(t, 1) DO(t, 2)
#define LOAD(p) _mm512_loadu_si512(p)
#define WIDEN(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(p)))
#define SPREAD(x) _mm512_set1_epi32(x)
#define ADD(a, b) _mm512_add_epi32(a, b)
#define SHIFT(a) _mm512_slli_epi32(a, 16)
#define LOWER(a, b) _mm512_unpacklo_epi16(a, b)
#define UPPER(a, b) _mm512_unpackhi_epi16(a, b)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define FOLD(v) fold8(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)))
#define SUM4(a, b, c, d) sum4(FOLD(a), FOLD(b), FOLD(c), FOLD(d))

#define NAME(x) x##_vnni
#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512vnni")))
#define MADD(s, a, b) __asm__("vpdpwssd %2, %1, %0" : "+v"(s) : "v"(a), "v"(b));
#include "product_kernel.h"
#undef NAME
#undef TARGET
#undef MADD

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512vl")))
#define MADD(s, a, b) ADD_PRODUCTS(s, a, b, "v")
#include "product_kernel.h"
#undef NAME
#undef TARGET
#undef MADD
#undef VEC
#undef LANES
#undef EACH_ROW
#undef EACH_VECTOR
#undef LOAD
#undef WIDEN
#undef SPREAD
#undef ADD
#undef SHIFT
#undef LOWER
#undef UPPER
#undef STORE
#undef FOLD

#define NAME(x) x##_avx2
#define TARGET AVX2
#define VEC __m256i
#define LANES 8
#define EACH_ROW(DO) DO(0) DO(1) DO(2)
#define EACH_VECTOR(DO, t) DO(t, 0) DO(t, 1)
#define LOAD(p) _mm256_loadu_si256((const void *)(p))
#define WIDEN(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(p)))
#define SPREAD(x) _mm256_set1_epi32(x)
#define ADD(a, b) _mm256_add_epi32(a, b)
#define SHIFT(a) _mm256_slli_epi32(a, 16)
#define LOWER(a, b) _mm256_unpacklo_epi16(a, b)
#define UPPER(a, b) _mm256_unpackhi_epi16(a, b)
#define STORE(p, v) _mm256_storeu_si256((void *)(p), v)
#define FOLD(v) fold8(v)
#define MADD(s, a, b) ADD_PRODUCTS(s, a, b, "x")
#include "product_kernel.h"

/* Eight columns times eight pairs of a weight [columns][inner], transposed: out [pair][PANEL]. */
AVX2 static void transpose(const char *weight, int64_t stride, int bytes, int32_t *out)
{
    __m256i v[8], w[8];
    for (int i = 0; i < 8; i++) {
        const void *from = weight + i * stride * bytes;
        v[i] = bytes == 2 ? _mm256_loadu_si256(from) : _mm256_cvtepi8_epi16(_mm_loadu_si128(from));
    }
    for (int i = 0; i < 8; i += 2) {
        w[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        w[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm256_unpacklo_epi64(w[i + j], w[i + j + 2]);
            v[i + 2 * j + 1] = _mm256_unpackhi_epi64(w[i + j], w[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((void *)(out + i * PANEL), _mm256_permute2x128_si256(v[i], v[i + 4], 0x20));
        _mm256_storeu_si256((void *)(out + (i + 4) * PANEL), _mm256_permute2x128_si256(v[i], v[i + 4], 0x31));
    }
}

/* Eight columns of two rows of a weight [inner][columns], side by side in pairs. */
AVX2 static inline void zip(const char *weight, int64_t stride, int bytes, int32_t *out)
{
    __m128i row[2];
    for (int j = 0; j < 2; j++) {
        const void *from = weight + j * stride * bytes;
        __builtin_prefetch(weight + (AHEAD + j) * stride * bytes);
        row[j] = bytes == 2 ? _mm_loadu_si128(from) : _mm_cvtepi8_epi16(_mm_loadl_epi64(from));
    }
    _mm_storeu_si128((void *)out, _mm_unpacklo_epi16(row[0], row[1]));
    _mm_storeu_si128((void *)(out + 4), _mm_unpackhi_epi16(row[0], row[1]));
}

#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#define CLONES

#define NAME(x) x##_neon
#define TARGET
#define VEC int32x4_t
#define LANES 4
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3)
#define EACH_VECTOR(DO, t) DO(t, 0) DO(t, 1) DO(t, 2)
#define HALVES(v) vreinterpretq_s16_s32(v)
#define LOAD(p) vld1q_s32((const int32_t *)(const void *)(p))
#define WIDEN(p) vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p)))
#define SPREAD(x) vdupq_n_s32(x)
#define ADD(a, b) vaddq_s32(a, b)
#define SHIFT(a) vshlq_n_s32(a, 16)
#define LOWER(a, b) vreinterpretq_s32_s16(vzip1q_s16(HALVES(a), HALVES(b)))
#define UPPER(a, b) vreinterpretq_s32_s16(vzip2q_s16(HALVES(a), HALVES(b)))
#define STORE(p, v) vst1q_s32(p, v)
#define SUM4(a, b, c, d) vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))
#define FOUR int32x4_t
#define MADD(s, a, b)                                                                          \
    s = vaddq_s32(s, vpaddq_s32(vmull_s16(vget_low_s16(HALVES(a)), vget_low_s16(HALVES(b))),   \
                                vmull_high_s16(HALVES(a), HALVES(b))));
#include "product_kernel.h"

static void transpose(const char *weight, int64_t stride, int bytes, int32_t *out)
{
    for (int column = 0; column < 8; column++)
        for (int pair = 0; pair < 8; pair++) {
            int16_t both[2];
            if (bytes == 2)
                memcpy(both, weight + (column * stride + 2 * pair) * 2, 4);
            else
                for (int j = 0; j < 2; j++)
                    both[j] = ((const int8_t *)weight)[column * stride + 2 * pair + j];
            memcpy(out + pair * PANEL + column, both, 4);
        }
}

static inline void zip(const char *weight, int64_t stride, int bytes, int32_t *out)
{
    int16x8_t row[2];
    for (int j = 0; j < 2; j++) {
        const char *from = weight + j * stride * bytes;
        row[j] = bytes == 2 ? vld1q_s16((const int16_t *)(const void *)from) : vmovl_s8(vld1_s8((const int8_t *)from));
    }
    vst1q_s32(out, vreinterpretq_s32_s16(vzip1q_s16(row[0], row[1])));
    vst1q_s32(out + 4, vreinterpretq_s32_s16(vzip2q_s16(row[0], row[1])));
}
#endif

#ifdef CLONES

/* Pairs of a row's halves, for tiles: out [pair][tile_rows][2]. */
CLONES static void split_pairs(const int32_t *row, int64_t inner, int place, int tile_rows, int32_t *out)
{
    out += 2 * place;
    for (int64_t g = 0; g < (inner + 1) / 2; g++) {
        uint32_t a = (uint32_t)row[2 * g], b = 2 * g + 1 < inner ? (uint32_t)row[2 * g + 1] : 0;
        out[g * tile_rows * 2] = (int32_t)((a & 0xffff) | b << 16);
        a += 0x8000, b += 0x8000; /* carries what the low half, which is signed, takes */
        out[g * tile_rows * 2 + 1] = (int32_t)(a >> 16 | (b & 0xffff0000u));
    }
}

/* A row's halves apart, for dots. */
CLONES static void split_halves(const int32_t *row, int64_t inner, int16_t *low, int16_t *high)
{
    for (int64_t k = 0; k < inner; k++) {
        low[k] = (int16_t)row[k];
        high[k] = (int16_t)(((uint32_t)row[k] + 0x8000) >> 16);
    }
}

/* PANEL columns of a weight, or fewer, as out [pair][PANEL], zeros beyond its ends. The weight, of so many bytes an
 * element, is [columns][inner] if by_rows, else [inner][columns].
 */
#if defined(__x86_64__)
AVX2
#endif
static void pack(const char *weight, int64_t stride, int bytes, int by_rows, int64_t inner, int64_t columns,
                 int32_t *out)
{
    if (columns < PANEL)
        memset(out, 0, (size_t)((inner + 1) / 2 * PANEL * 4));
    int64_t turned = by_rows ? inner / 16 * 16 : inner / 2 * 2, whole = columns / 8 * 8;
    if (by_rows)
        for (int64_t n = 0; n < whole; n += 8)
            for (int64_t k = 0; k < turned; k += 16)
                transpose(weight + (n * stride + k) * bytes, stride, bytes, out + k / 2 * PANEL + n);
    else
        for (int64_t k = 0; k < turned; k += 2)
            for (int64_t n = 0; n < whole; n += 8)
                zip(weight + (k * stride + n) * bytes, stride, bytes, out + k / 2 * PANEL + n);
    for (int64_t n = 0; n < columns; n++)
        for (int64_t k = n < whole ? turned : 0; k < inner; k += 2) {
            int16_t both[2] = {0, 0};
            for (int64_t j = k; j < inner && j < k + 2; j++) {
                const char *from = weight + (by_rows ? n * stride + j : j * stride + n) * bytes;
                both[j - k] = bytes == 2 ? *(const int16_t *)from : *(const int8_t *)from;
            }
            memcpy(out + k / 2 * PANEL + n, both, 4);
        }
}

#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include "product_amx.h"
#endif

typedef struct {
    const char *name;
    int tile_rows, tile_columns, lanes;
    int whole; /* elements of a row: for tiles, rows are split up in whole numbers of them */
    void (*split)(const int32_t *row, int64_t inner, int place, int tile_rows, int32_t *out);
    void (*pack)(const char *weight, int64_t stride, int bytes, int by_rows, int64_t inner, int64_t columns,
                 int32_t *out);
    void (*tile)(const int32_t *rows, const int32_t *panel, int64_t pairs, int32_t *out);
    void (*dot)(const int16_t *low, const int16_t *high, const void *weight, int64_t stride, int bytes,
                int64_t columns, int64_t inner, int32_t *out);
    void (*add_rows)(const int32_t *pairs, const void *const *weights, int bytes, int64_t columns, int32_t *low,
                     int32_t *high);
    /* Before and after tiles, on every thread. */
    void (*begin)(void);
    void (*end)(void);
} kernel;

/* The kernels of this processor, the best first; how many. */
static int kernels(kernel *found)
{
    int count = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    int avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#if defined(AMX)
    if (avx512 && __builtin_cpu_supports("avx512vnni") && has_tiles())
        found[count++] = (kernel){"amx", 16, 16, 16, 64, split_amx, pack_amx, tile_amx, dot_vnni, add_rows_vnni,
                                  begin_amx, end_amx};
#endif
    if (avx512 && __builtin_cpu_supports("avx512vnni"))
        found[count++] = (kernel){"avx512-vnni", 4, 48, 16, 2, split_pairs, pack, tile_vnni, dot_vnni,
                                  add_rows_vnni, NULL, NULL};
    if (avx512)
        found[count++] = (kernel){"avx512", 4, 48, 16, 2, split_pairs, pack, tile_avx512, dot_avx512,
                                  add_rows_avx512, NULL, NULL};
    if (__builtin_cpu_supports("avx2"))
        found[count++] = (kernel){"avx2", 3, 16, 8, 2, split_pairs, pack, tile_avx2, dot_avx2, add_rows_avx2, NULL, NULL};
#elif defined(__aarch64__) && defined(__GNUC__)
    found[count++] = (kernel){"neon", 4, 12, 4, 2, split_pairs, pack, tile_neon, dot_neon, add_rows_neon, NULL, NULL};
#endif
    return count;
}

/* The name of a kernel that runs here, or NULL if there are not so many. */
const char *ring_kernel(int which)
{
    kernel found[4];
    return which < kernels(found) ? found[which].name : NULL;
}

/* Few rows: every weight is read once, in the order in which it lies in memory, which is the limit. */
static int few(const kernel *use, const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner,
               const char *weight, int64_t weight_stride, int bytes, int64_t columns, int32_t *out,
               int64_t out_stride, int threads)
{
    int64_t padded = (inner + 31) / 32 * 32;
    int16_t *halves = aligned_alloc(64, (size_t)(count * 2 * padded * 2));
    if (halves == NULL)
        return 1;
    memset(halves, 0, (size_t)(count * 2 * padded * 2));
    for (int64_t t = 0; t < count; t++)
        split_halves(rows + t * row_stride, inner, halves + 2 * t * padded, halves + (2 * t + 1) * padded);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t n = 0; n < columns; n += 4)
        for (int64_t t = 0; t < count; t++)
            use->dot(halves + 2 * t * padded, halves + (2 * t + 1) * padded, weight + n * weight_stride * bytes,
                     weight_stride, bytes, columns - n, inner, out + t * out_stride + n);
    free(halves);
    return 0;
}

/* Few rows and a weight [inner][columns], which is read once, eight of its rows at a time. */
static int few_columns(const kernel *use, const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner,
                       const char *weight, int64_t weight_stride, int bytes, int64_t columns, int32_t *out,
                       int64_t out_stride, int threads)
{
    int failed = 0, block = 2 * use->lanes;
    int64_t eights = (inner + 7) / 8, share = ((columns + threads - 1) / threads + block - 1) / block * block;
    int64_t strip = share < STRIP ? share : STRIP;
    int32_t *pairs = calloc((size_t)(count * eights), 8 * sizeof(int32_t));
    if (pairs == NULL)
        return 1;
    for (int64_t t = 0; t < count; t++)
        split_pairs(rows + t * row_stride, inner, 0, 1, pairs + t * eights * 8);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t at = 0; at < columns; at += strip) {
        int64_t wide = columns - at < strip ? columns - at : strip, whole = wide / block * block;
        int32_t *sums = calloc((size_t)(count * 2 * strip), sizeof(int32_t));
        if (sums == NULL) {
            failed = 1;
            continue;
        }
        for (int64_t eight = 0; eight < eights; eight++) {
            const void *weights[8];
            for (int64_t j = 0; j < 8; j++) {
                /* Beyond the end the numbers of the row are 0, and any row of the weight will do. */
                int64_t k = 8 * eight + j < inner ? 8 * eight + j : inner - 1;
                weights[j] = weight + (k * weight_stride + at) * bytes;
            }
            for (int64_t t = 0; t < count; t++)
                use->add_rows(pairs + (t * eights + eight) * 8, weights, bytes, whole, sums + 2 * t * strip,
                              sums + (2 * t + 1) * strip);
        }
        for (int64_t t = 0; t < count; t++) {
            const int32_t *low = sums + 2 * t * strip, *high = low + strip;
            int32_t *to = out + t * out_stride + at;
            for (int64_t n = 0; n < whole; n++) {
                int64_t in = n % block, place = n - in + in / 8 * 4 + in % 4 + (in % 8 < 4 ? 0 : use->lanes);
                to[n] = (int32_t)((uint32_t)low[place] + ((uint32_t)high[place] << 16));
            }
            for (int64_t n = whole; n < wide; n++) {
                uint32_t sum = 0;
                for (int64_t k = 0; k < inner; k++) {
                    const char *from = weight + (k * weight_stride + at + n) * bytes;
                    int32_t element = bytes == 2 ? *(const int16_t *)from : *(const int8_t *)from;
                    sum += (uint32_t)rows[t * row_stride + k] * (uint32_t)element;
                }
                to[n] = (int32_t)sum;
            }
        }
        free(sums);
    }
    free(pairs);
    return failed;
}

/* A block of rows and a panel: out gets, or with more than one DEPTH has added to it, what they make. */
CLONES static void put(const int32_t *from, int64_t rows, int64_t columns, int32_t *out, int64_t out_stride, int add)
{
    for (int64_t t = 0; t < rows; t++)
        for (int64_t n = 0; n < columns; n++)
            out[t * out_stride + n] = (int32_t)((uint32_t)from[t * PANEL + n] +
                                                (add ? (uint32_t)out[t * out_stride + n] : 0));
}

/* out [count, columns] = rows [count, inner] times the weight, modulo 2^32, by the kernel of this number.
 *
 * The weight, of 1 or 2 bytes an element, is [columns, inner] if by_rows, else [inner, columns]; strides are in
 * elements, and the elements of a row lie side by side. 0, or 1 if there is no memory or no such kernel.
 */
int ring_multiply(int which, const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner,
                  const void *weight, int64_t weight_stride, int bytes, int by_rows, int64_t columns, int32_t *out,
                  int64_t out_stride, int threads)
{
    kernel found[4];
    if (which < 0 || which >= kernels(found))
        return 1;
    const kernel *use = &found[which];
    const int tall = use->tile_rows;
    if (count * columns * inner < SMALL)
        threads = 1;
    if (by_rows && count <= FEW)
        return few(use, rows, row_stride, count, inner, weight, weight_stride, bytes, columns, out, out_stride,
                   threads);
    if (!by_rows && count <= FEW_COLUMNS)
        return few_columns(use, rows, row_stride, count, inner, weight, weight_stride, bytes, columns, out,
                           out_stride, threads);
    enum { PANEL_SIZE = DEPTH / 2 * PANEL };
    int64_t block = count < ROWS ? (count + tall - 1) / tall * tall : ROWS;
    int32_t *panels = aligned_alloc(64, (size_t)(threads * PANEL_SIZE + block * DEPTH) * 4);
    if (panels == NULL)
        return 1;
    int32_t *split = panels + threads * PANEL_SIZE;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int32_t *panel = panels + omp_get_thread_num() * PANEL_SIZE;
        if (use->begin)
            use->begin();
        for (int64_t first = 0; first < count; first += block)
            for (int64_t depth = 0; depth < inner; depth += DEPTH) {
                int64_t here = count - first < block ? count - first : block;
                int64_t deep = inner - depth < DEPTH ? inner - depth : DEPTH;
                int64_t size = (deep + use->whole - 1) / use->whole * use->whole; /* of a row that is split */
#pragma omp for schedule(static)
                for (int64_t t = 0; t < (here + tall - 1) / tall * tall; t++) {
                    /* The last tile's rows beyond the end are the last again. */
                    const int32_t *row = rows + (first + (t < here ? t : here - 1)) * row_stride + depth;
                    use->split(row, deep, (int)(t % tall), tall, split + t / tall * tall * size);
                }
#pragma omp for schedule(dynamic)
                for (int64_t at = 0; at < columns; at += PANEL) {
                    int64_t corner = by_rows ? at * weight_stride + depth : depth * weight_stride + at;
                    int64_t wide = columns - at < PANEL ? columns - at : PANEL;
                    use->pack((const char *)weight + corner * bytes, weight_stride, bytes, by_rows, deep, wide, panel);
                    for (int64_t t = 0; t < here; t += tall) {
                        int32_t sums[16 * PANEL];
                        for (int64_t n = 0; n < wide; n += use->tile_columns)
                            use->tile(split + t * size, panel + n, (deep + 1) / 2, sums + n);
                        put(sums, here - t < tall ? here - t : tall, wide, out + (first + t) * out_stride + at,
                            out_stride, depth > 0);
                    }
                }
            }
        if (use->end)
            use->end();
    }
    free(panels);
    return 0;
}

#else

int ring_multiply(int which, const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner,
                  const void *weight, int64_t weight_stride, int bytes, int by_rows, int64_t columns, int32_t *out,
                  int64_t out_stride, int threads)
{
    return 1;
}

const char *ring_kernel(int which)
{
    return NULL;
}

#endif
