/* Rows of floats to integers and back, each in one pass (shared/ring/native.py).
 *
 * Every function computes exactly what its counterpart in torch does; tests compare them bit by bit.
 * Sizes and pointers are checked by the caller.
 */
#include <math.h>
#include <stdint.h>
#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif

/* Of the functions' arguments; the same number stands in native.py. */
int ring_version(void)
{
    return 4;
}

/* Whether so many floats, given by their bits, are numbers of less than a limit's size, given likewise. */
CLONES int ring_below(const uint32_t *bits, int64_t count, uint32_t limit)
{
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= (bits[i] & 0x7fffffffu) >= limit;
    return !found;
}

enum { ZERO_EXPONENT = -8 * 512 }; /* of a row of zeros: shared/ring/fixed_point.py */

/* A row's step, times 2^-power, from its exponent: shared/ring/fixed_point.py, "exponents". */
static double step_of(int32_t exponent, int *power)
{
    int32_t eighths = exponent & 7;
    *power = (exponent - eighths) / 8;
    return (8 + eighths) / 16.0;
}

/* Float rows to integers under masks.
 *
 * One row is its tensors side by side, times scales if there are any (NULL: none). exponents[t] becomes that of
 * a step with |x| / step <= max_norm, and round(x / step) is added to requests[t], which holds the mask. With a
 * projection, expected[t] = sum round(x / step) * projection, modulo 2^64. integers, if wanted, are round(x / step), none
 * of which is over 2^24. 0, or 1 if a norm is not finite.
 */
CLONES static int mask_rows(const float *const *tensors, const int64_t *widths, int64_t parts, int64_t columns,
                            int64_t first, int64_t last, const float *scales, double step_per_norm,
                            const int64_t *projection, int32_t *requests, int32_t *exponents, uint64_t *expected,
                            float *integers)
{
    for (int64_t t = first; t < last; t++) {
        double squares = 0;
        int64_t at = 0;
        for (int64_t b = 0; b < parts; at += widths[b++]) {
            const float *x = tensors[b] + t * widths[b];
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
        double fraction = frexp(norm * step_per_norm, &power);
        exponents[t] = norm > 0 ? 8 * power + (int32_t)ceil(16 * fraction) - 8 : ZERO_EXPONENT;
        double step = step_of(exponents[t], &power), scale = ldexp(1 / step, -power);
        uint64_t sum = 0;
        at = 0;
        for (int64_t b = 0; b < parts; at += widths[b++]) {
            const float *x = tensors[b] + t * widths[b];
            int32_t *out = requests + t * columns + at;
            for (int64_t i = 0; i < widths[b]; i++) {
                double value = scales ? x[i] * scales[at + i] : x[i];
                int64_t integer = (int32_t)rint(value * scale);
                out[i] = (int32_t)((uint32_t)out[i] + (uint32_t)integer);
                if (integers)
                    integers[t * columns + at + i] = (float)integer;
                if (projection)
                    sum += (uint64_t)integer * (uint64_t)projection[at + i];
            }
        }
        if (projection)
            expected[t] = sum;
    }
    return 0;
}

int ring_quantize_and_mask(const float *const *tensors, const int64_t *widths, int64_t parts, int64_t columns,
                           int64_t rows, const float *scales, double step_per_norm, const int64_t *projection,
                           int32_t *requests, int32_t *exponents, uint64_t *expected, float *integers, int threads)
{
    int failed = 0;
    int64_t step = (rows + 4 * threads - 1) / (4 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : failed) if (threads > 1)
    for (int64_t first = 0; first < rows; first += step)
        failed |= mask_rows(tensors, widths, parts, columns, first, first + step < rows ? first + step : rows,
                            scales, step_per_norm, projection, requests, exponents, expected, integers);
    return failed;
}

/* step s u, or step s (u1 + u2 / 256), of a row of products, the planes side by side, written to row t of tensors. */
#define WRITE(NAME, NUMBER)                                                                                            \
    static inline __attribute__((always_inline)) void NAME(                                                            \
        const NUMBER *u, int planes, int64_t width, int64_t t, int32_t exponent, const float *scales,                  \
        float *const *tensors, const int64_t *widths, int64_t parts)                                                   \
    {                                                                                                                  \
        int64_t at = 0;                                                                                                \
        int power = 0;                                                                                                 \
        double step = step_of(exponent, &power), far_scale = ldexp(step, power);                                       \
        int near = power > -64 && power < 64;                                                                          \
        float scale = near ? (float)far_scale : 0.0f;                                                                  \
        for (int64_t b = 0; b < parts; at += widths[b++]) {                                                            \
            float *out = tensors[b] + t * widths[b];                                                                   \
            const NUMBER *a = u + at, *c = planes > 1 ? a + width : NULL;                                              \
            const float *s = scales ? scales + at : NULL;                                                              \
            if (near && c)                                                                                             \
                for (int64_t i = 0; i < widths[b]; i++)                                                                \
                    out[i] = ((float)c[i] * 0.00390625f + (float)a[i]) * (s ? s[i] : 1.0f) * scale;                    \
            else if (near)                                                                                             \
                for (int64_t i = 0; i < widths[b]; i++)                                                                \
                    out[i] = (float)a[i] * (s ? s[i] : 1.0f) * scale;                                                  \
            else                                                                                                       \
                for (int64_t i = 0; i < widths[b]; i++)                                                                \
                    out[i] = (float)((c ? (double)c[i] * 0.00390625 + (double)a[i] : (double)a[i]) *                   \
                                     (s ? s[i] : 1.0f) * far_scale);                                                   \
        }                                                                                                              \
    }

WRITE(write_integers, int32_t)
WRITE(write_floats, float)

/* Answers to float rows: effects off, checked, and step s u, or step s (u1 + u2 / 256), written.
 *
 * A row of answers holds the products with the one plane, or with the first and then with the second, each so
 * wide; effects likewise. With a challenge, sum u * challenge must be expected[t], modulo 2^64. How many rows
 * are wrong.
 */
CLONES static int64_t unmask_rows(int32_t *answers, const int32_t *const *effects, int64_t sources, int planes,
                                  int64_t width, int64_t first, int64_t last, const int32_t *exponents,
                                  const float *scales, float *const *tensors, const int64_t *widths, int64_t parts,
                                  const int32_t *challenge, const uint64_t *expected)
{
    int64_t wrong = 0;
    for (int64_t t = first; t < last; t++) {
        int32_t *u = answers + t * planes * width;
        for (int64_t k = 0; k < sources; k++) {
            const int32_t *effect = effects[k] + t * planes * width;
            for (int64_t i = 0; i < planes * width; i++)
                u[i] = (int32_t)((uint32_t)u[i] - (uint32_t)effect[i]);
        }
        if (challenge) {
            int64_t sum = 0;
            for (int64_t i = 0; i < planes * width; i++)
                sum = (int64_t)((uint64_t)sum + (uint64_t)((int64_t)u[i] * (int64_t)challenge[i]));
            wrong += (uint64_t)sum != expected[t];
        }
        write_integers(u, planes, width, t, exponents[t], scales, tensors, widths, parts);
    }
    return wrong;
}

int64_t ring_unmask_and_dequantize(int32_t *answers, const int32_t *const *effects, int64_t sources, int planes,
                                   int64_t width, int64_t rows, const int32_t *exponents, const float *scales,
                                   float *const *tensors, const int64_t *widths, int64_t parts,
                                   const int32_t *challenge, const uint64_t *expected, int threads)
{
    int64_t wrong = 0, step = (rows + 4 * threads - 1) / (4 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : wrong) if (threads > 1)
    for (int64_t first = 0; first < rows; first += step)
        wrong += unmask_rows(answers, effects, sources, planes, width, first, first + step < rows ? first + step : rows,
                             exponents, scales, tensors, widths, parts, challenge, expected);
    return wrong;
}

/* The upper 16 or 24 bits of integers, little-endian, one behind the other. A row begins every stride integers. */
CLONES static void cut_rows(const int32_t *numbers, int64_t stride, int64_t columns, int bits, int64_t first,
                            int64_t last, uint8_t *out)
{
    for (int64_t t = first; t < last; t++) {
        const int32_t *row = numbers + t * stride;
        if (bits == 16) {
            int16_t *upper = (int16_t *)out + t * columns;
            for (int64_t i = 0; i < columns; i++)
                upper[i] = (int16_t)(row[i] >> 16);
        } else {
            uint8_t *upper = out + 3 * t * columns;
            for (int64_t i = 0; i < columns; i++) {
                uint32_t number = (uint32_t)row[i];
                upper[3 * i] = (uint8_t)(number >> 8);
                upper[3 * i + 1] = (uint8_t)(number >> 16);
                upper[3 * i + 2] = (uint8_t)(number >> 24);
            }
        }
    }
}

void ring_take_upper_bits(const int32_t *numbers, int64_t rows, int64_t stride, int64_t columns, int bits,
                          uint8_t *out, int threads)
{
    int64_t step = (rows + 4 * threads - 1) / (4 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t first = 0; first < rows; first += step)
        cut_rows(numbers, stride, columns, bits, first, first + step < rows ? first + step : rows, out);
}

/* Halves of answers less those of effects, modulo 2^16, as floats with an offset: shared/ring/upper_bits.py. */
CLONES static void subtract_halves(const int16_t *answers, const int16_t *const *effects, int64_t sources,
                                   int64_t first, int64_t last, float offset, float *out)
{
    if (sources == 1) {
        const int16_t *effect = effects[0];
        for (int64_t i = first; i < last; i++)
            out[i] = (float)(int16_t)((uint16_t)answers[i] - (uint16_t)effect[i]) + offset;
        return;
    }
    for (int64_t i = first; i < last; i++) {
        uint16_t rest = (uint16_t)answers[i];
        for (int64_t k = 0; k < sources; k++)
            rest = (uint16_t)(rest - (uint16_t)effects[k][i]);
        out[i] = (float)(int16_t)rest + offset;
    }
}

void ring_subtract_halves(const int16_t *answers, const int16_t *const *effects, int64_t sources, int64_t count,
                          float offset, float *out, int threads)
{
    int64_t step = (count + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t first = 0; first < count; first += step)
        subtract_halves(answers, effects, sources, first, first + step < count ? first + step : count, offset, out);
}

/* The same for products that are floats already. */
CLONES static void write_rows(const float *products, int planes, int64_t width, int64_t first, int64_t last,
                              const int32_t *exponents, const float *scales, float *const *tensors,
                              const int64_t *widths, int64_t parts)
{
    for (int64_t t = first; t < last; t++)
        write_floats(products + t * planes * width, planes, width, t, exponents[t], scales, tensors, widths, parts);
}

void ring_write(const float *products, int planes, int64_t width, int64_t rows, const int32_t *exponents,
                const float *scales, float *const *tensors, const int64_t *widths, int64_t parts, int threads)
{
    int64_t step = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t first = 0; first < rows; first += step)
        write_rows(products, planes, width, first, first + step < rows ? first + step : rows, exponents, scales,
                   tensors, widths, parts);
}
