/* The inner loops of products for one set of instructions; product.c includes this once for each.
 *
 * Before: NAME(x) makes names of functions, TARGET says for which processor they are compiled. VEC is a vector of
 * LANES int32. A tile has the rows of EACH_ROW and the vectors of columns of EACH_VECTOR.
 *   LOAD(p)          a vector of pairs of int16
 *   WIDEN(p)         the same from int8
 *   SPREAD(x)        the same pair everywhere
 *   MADD(s, a, b)    add to s both products of each pair, modulo 2^32
 *   SUM4(a, b, c, d) the sums of all lanes of each, a FOUR
 *   LOWER(a, b), UPPER(a, b)  pairs of int16 of a and b, of the lower and upper half of each 16 bytes
 *
 * Sums have names of their own, and not places in an array, because compilers keep those in registers.
 */

/* A tile: sums of low and high halves apart, put together at the end. rows [pairs][rows of a tile][2] holds pairs of
 * low halves and pairs of high halves, panel [pairs][PANEL] pairs of weights, out [rows of a tile][PANEL].
 */
#define ZERO(t, v) VEC low_##t##_##v = SPREAD(0), high_##t##_##v = SPREAD(0);
#define ZERO_ROW(t) EACH_VECTOR(ZERO, t)
#define WEIGHT(t, v) VEC weight_##v = LOAD(panel + v * LANES);
#define LOW(t, v) MADD(low_##t##_##v, row, weight_##v);
#define HIGH(t, v) MADD(high_##t##_##v, row, weight_##v);
#define ROW(t)                 \
    row = SPREAD(rows[2 * t]); \
    EACH_VECTOR(LOW, t)        \
    row = SPREAD(rows[2 * t + 1]); \
    EACH_VECTOR(HIGH, t)
#define PUT(t, v) STORE(out + t * PANEL + v * LANES, ADD(low_##t##_##v, SHIFT(high_##t##_##v)));
#define PUT_ROW(t) EACH_VECTOR(PUT, t)
#define ONE(t) +1

TARGET static void NAME(tile)(const int32_t *rows, const int32_t *panel, int64_t pairs, int32_t *out)
{
    EACH_ROW(ZERO_ROW)
    for (int64_t g = 0; g < pairs; g++, rows += 2 * (EACH_ROW(ONE)), panel += PANEL) {
        VEC row;
        EACH_VECTOR(WEIGHT, 0)
        EACH_ROW(ROW)
    }
    EACH_ROW(PUT_ROW)
}

/* A row times four columns of a weight [columns][inner] as it lies in memory; low and high [inner] halves of the
 * row, with zeros up to whole vectors. Fewer columns are padded by repeating the first.
 */
#define CLEAR(c) VEC low_##c = SPREAD(0), high_##c = SPREAD(0);
#define FOUR_COLUMNS(DO) DO(0) DO(1) DO(2) DO(3)
#define FROM(c) const ELEMENT *weight_##c = (const ELEMENT *)weight + (columns > c ? c * stride : 0);
#define MULTIPLY(c)        \
    w = READ(weight_##c + k); \
    MADD(low_##c, a, w)    \
    MADD(high_##c, b, w)
#define REST(c)                                                          \
    memcpy(rest, weight_##c + k, (size_t)(inner - k) * sizeof(ELEMENT)); \
    w = READ(rest);                                                      \
    MADD(low_##c, a, w)                                                  \
    MADD(high_##c, b, w)
#define TOTAL(c) ADD(low_##c, SHIFT(high_##c))
#define DOT                                                                                \
    FOUR_COLUMNS(FROM)                                                                     \
    FOUR_COLUMNS(CLEAR)                                                                    \
    int64_t k = 0;                                                                         \
    VEC w;                                                                                 \
    for (; k + 2 * LANES <= inner; k += 2 * LANES) {                                       \
        VEC a = LOAD(low + k), b = LOAD(high + k);                                         \
        FOUR_COLUMNS(MULTIPLY)                                                             \
    }                                                                                      \
    if (k < inner) {                                                                       \
        ELEMENT rest[2 * LANES] = {0};                                                     \
        VEC a = LOAD(low + k), b = LOAD(high + k);                                         \
        FOUR_COLUMNS(REST)                                                                 \
    }                                                                                      \
    FOUR sums = SUM4(TOTAL(0), TOTAL(1), TOTAL(2), TOTAL(3));                              \
    memcpy(out, &sums, 4 * (size_t)(columns > 4 ? 4 : columns));

TARGET static void NAME(dot)(const int16_t *low, const int16_t *high, const void *weight, int64_t stride, int bytes,
                             int64_t columns, int64_t inner, int32_t *out)
{
    if (bytes == 2) {
#define ELEMENT int16_t
#define READ LOAD
        DOT
#undef ELEMENT
#undef READ
    } else {
#define ELEMENT int8_t
#define READ WIDEN
        DOT
#undef ELEMENT
#undef READ
    }
}

/* Eight rows of a weight [inner][columns] times as many numbers of one row, added to low and high [columns], whose
 * order within 2 * LANES is that of LOWER and then UPPER. pairs [4][2] as in a tile; columns a multiple of 2 * LANES.
 */
#define EACH_PAIR(DO) DO(0) DO(1) DO(2) DO(3)
#define PAIR(p)                                                                                    \
    {                                                                                              \
        VEC first = READ((const ELEMENT *)weights[2 * p] + n);                                     \
        VEC second = READ((const ELEMENT *)weights[2 * p + 1] + n);                                \
        VEC lower = LOWER(first, second), upper = UPPER(first, second), row = SPREAD(pairs[2 * p]); \
        MADD(low_0, row, lower)                                                                    \
        MADD(low_1, row, upper)                                                                    \
        row = SPREAD(pairs[2 * p + 1]);                                                            \
        MADD(high_0, row, lower)                                                                   \
        MADD(high_1, row, upper)                                                                   \
    }
#define ADD_ROWS                                                         \
    for (int64_t n = 0; n < columns; n += 2 * LANES) {                   \
        VEC low_0 = LOAD(low + n), low_1 = LOAD(low + n + LANES);        \
        VEC high_0 = LOAD(high + n), high_1 = LOAD(high + n + LANES);    \
        EACH_PAIR(PAIR)                                                  \
        STORE(low + n, low_0);                                           \
        STORE(low + n + LANES, low_1);                                   \
        STORE(high + n, high_0);                                         \
        STORE(high + n + LANES, high_1);                                 \
    }

TARGET static void NAME(add_rows)(const int32_t *pairs, const void *const *weights, int bytes, int64_t columns,
                                  int32_t *low, int32_t *high)
{
    if (bytes == 2) {
#define ELEMENT int16_t
#define READ LOAD
        ADD_ROWS
#undef ELEMENT
#undef READ
    } else {
#define ELEMENT int8_t
#define READ WIDEN
        ADD_ROWS
#undef ELEMENT
#undef READ
    }
}

#undef ZERO
#undef ZERO_ROW
#undef WEIGHT
#undef LOW
#undef HIGH
#undef ROW
#undef PUT
#undef PUT_ROW
#undef ONE
#undef CLEAR
#undef FOUR_COLUMNS
#undef FROM
#undef MULTIPLY
#undef REST
#undef TOTAL
#undef EACH_PAIR
#undef PAIR
#undef ADD_ROWS
#undef DOT
