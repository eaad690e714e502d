/* Every kernel of shared/ring/product.c that this processor has, against plain sums; tests/unit/test_ring_c.py. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *ring_kernel(int which);
int ring_multiply(int which, const int32_t *rows, int64_t row_stride, int64_t count, int64_t inner,
                  const void *weight, int64_t weight_stride, int bytes, int by_rows, int64_t columns, int32_t *out,
                  int64_t out_stride, int threads);

static uint64_t state = 1;

static uint32_t next(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static int check(int which, int64_t count, int64_t inner, int64_t columns, int bytes, int by_rows)
{
    int64_t stride = (by_rows ? inner : columns) + 3, out_stride = columns + 2;
    int64_t high = by_rows ? columns : inner;
    int32_t *rows = malloc((size_t)(count * inner) * 4), *out = malloc((size_t)(count * out_stride) * 4);
    /* Exactly as large as it must be, so that a tool sees who reads beyond. */
    char *weight = malloc((size_t)((high - 1) * stride + (by_rows ? inner : columns)) * (size_t)bytes);
    for (int64_t i = 0; i < count * inner; i++) {
        static const uint32_t ends[] = {0x80000000u, 0x7fffffffu, 0x7fff8000u, 0x7f7f7f80u, 0u};
        uint32_t draw = next();
        rows[i] = (int32_t)(draw % 4 ? next() : ends[draw / 4 % 5]);
    }
    for (int64_t i = 0; i < ((high - 1) * stride + (by_rows ? inner : columns)) * bytes; i++)
        weight[i] = (char)next();
    memset(out, 77, (size_t)(count * out_stride) * 4);
    int wrong = ring_multiply(which, rows, inner, count, inner, weight, stride, bytes, by_rows, columns, out,
                              out_stride, 2);
    for (int64_t t = 0; t < count && !wrong; t++) {
        for (int64_t n = 0; n < columns; n++) {
            uint32_t sum = 0;
            for (int64_t k = 0; k < inner; k++) {
                int64_t at = by_rows ? n * stride + k : k * stride + n;
                int32_t w = bytes == 2 ? ((int16_t *)weight)[at] : ((int8_t *)weight)[at];
                sum += (uint32_t)rows[t * inner + k] * (uint32_t)w;
            }
            wrong |= (uint32_t)out[t * out_stride + n] != sum;
        }
        for (int64_t n = columns; n < out_stride; n++)
            wrong |= out[t * out_stride + n] != 0x4d4d4d4d;
    }
    free(rows);
    free(out);
    free(weight);
    if (wrong)
        printf("%s: wrong for %d rows, %d -> %d, %d bytes, by_rows %d\n", ring_kernel(which), (int)count, (int)inner,
               (int)columns, bytes, by_rows);
    return wrong;
}

int main(void)
{
    static const int64_t counts[] = {1, 2, 5, 17, 23}, inners[] = {1, 7, 16, 33, 64, 131, 1025},
                         columns[] = {1, 3, 32, 48, 65, 100};
    int wrong = 0;
    for (int which = 0; ring_kernel(which) != NULL; which++) {
        for (int c = 0; c < 5; c++)
            for (int i = 0; i < 7; i++)
                for (int n = 0; n < 6; n++)
                    for (int way = 0; way < 4; way++)
                        wrong |= check(which, counts[c], inners[i], columns[n], 1 + way % 2, way / 2);
        printf("%s\n", ring_kernel(which));
    }
    return wrong;
}
