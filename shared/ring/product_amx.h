/* Products of bytes by matrix tiles (AMX), which some processors have; product.c includes this.
 *
 * A tile has 16 rows of 64 bytes, and an instruction adds to 16 x 16 sums of int32 what 16 rows of 64 bytes and 64
 * rows of 16 bytes make.
 */
#define AMX __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vbmi")))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether there are such tiles, which the operating system gives to whom it was asked by. */
static int has_tiles(void)
{
    enum { BOTH = 1 << 24 | 1 << 25, ASK = 0x1023, TILE_DATA = 18 };
    static _Atomic int known; /* 1 no, 2 yes; asking takes long on a virtual machine */
    unsigned a, b, c, d;
    if (!known)
        known = 1 + (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BOTH) == BOTH &&
                     __builtin_cpu_supports("avx512vbmi") && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0);
    return known == 2;
}

/* Eight tiles of 16 rows of 64 bytes; constant, since compilers do not see that the instruction reads all of it. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

AMX static void begin_amx(void)
{
    _tile_loadconfig(&TILES);
}

AMX static void end_amx(void)
{
    _tile_release();
}

/* A row's bytes, the lowest first: out [64 elements][byte][row of the tile][64]. */
AMX static void split_amx(const int32_t *row, int64_t inner, int place, int tile_rows, int32_t *out)
{
    for (int64_t k = 0; k < inner; k += 64, out += 4 * 16 * tile_rows)
        for (int part = 0; part < 4; part++)
            for (int quarter = 0; quarter < 4; quarter++) {
                int64_t at = k + 16 * quarter, rest = inner - at;
                __mmask16 there = (__mmask16)(rest >= 16 ? 0xffff : rest > 0 ? (1 << rest) - 1 : 0);
                __m512i v = _mm512_maskz_loadu_epi32(there, row + at);
                _mm_storeu_si128((void *)(out + (part * tile_rows + place) * 16 + 4 * quarter),
                                 _mm512_cvtepi32_epi8(_mm512_srli_epi32(v, 8 * (unsigned)part)));
            }
}

/* As pack does, but for every four elements of the inner size, instead of two pairs, their low bytes and then their
 * high ones: out [inner / 4][low, high][PANEL].
 */
AMX static void pack_amx(const char *weight, int64_t stride, int bytes, int by_rows, int64_t inner, int64_t columns,
                         int32_t *out)
{
    char at[2][64];
    const int straight = !by_rows && columns == PANEL;
    for (int i = 0; i < 64; i++)
        for (int high = 0; high < 2; high++)
            /* Of pairs, two vectors; of rows of 16 elements, two in each vector. */
            at[high][i] = (char)(high + i % 4 / 2 * 64 + (straight ? i % 2 * 32 + i / 4 * 2 : i / 4 * 4 + i % 2 * 2));
    const __m512i low = _mm512_loadu_si512(at[0]), high = _mm512_loadu_si512(at[1]);
    if (!straight)
        pack(weight, stride, bytes, by_rows, inner, columns, out);
    for (int64_t k = 0; k < inner; k += 4, out += 2 * PANEL)
        for (int n = 0; n < PANEL; n += 16) {
            __m512i both[2];
            for (int i = 0; i < 2; i++) {
                if (!straight) {
                    both[i] = _mm512_loadu_si512(out + i * PANEL + n);
                    continue;
                }
                __m256i row[2];
                for (int j = 0; j < 2; j++) {
                    const char *from = weight + ((k + 2 * i + j) * stride + n) * bytes;
                    __builtin_prefetch(from + AHEAD * stride * bytes);
                    row[j] = k + 2 * i + j >= inner ? _mm256_setzero_si256()
                             : bytes == 2           ? _mm256_loadu_si256((const void *)from)
                                          : _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
                }
                both[i] = _mm512_inserti64x4(_mm512_castsi256_si512(row[0]), row[1], 1);
            }
            _mm512_storeu_si512(out + n, _mm512_permutex2var_epi8(both[0], low, both[1]));
            _mm512_storeu_si512(out + PANEL + n, _mm512_permutex2var_epi8(both[0], high, both[1]));
        }
}

/* r w = sum of 2^(8 (i + j)) r_i w_j over bytes of r, which all count as unsigned modulo 2^32, and of w, whose high
 * one is signed: seven products, in four sums.
 */
AMX static void tile_amx(const int32_t *rows, const int32_t *panel, int64_t pairs, int32_t *out)
{
    enum { WIDE = 2 * PANEL * 4 };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t g = 0; g < pairs; g += 32, rows += 4 * 16 * 16, panel += 32 * PANEL) {
        _tile_loadd(4, panel, WIDE);
        _tile_loadd(5, panel + PANEL, WIDE);
        _tile_loadd(6, rows, 64);
        _tile_loadd(7, rows + 2 * 256, 64);
        _tile_dpbuud(0, 6, 4);
        _tile_dpbusd(1, 6, 5);
        _tile_dpbuud(2, 7, 4);
        _tile_dpbusd(3, 7, 5);
        _tile_loadd(6, rows + 256, 64);
        _tile_loadd(7, rows + 3 * 256, 64);
        _tile_dpbuud(1, 6, 4);
        _tile_dpbusd(2, 6, 5);
        _tile_dpbuud(3, 7, 4);
    }
    int32_t sums[4][16][16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int t = 0; t < 16; t++) {
        __m512i sum = _mm512_load_si512(sums[3][t]);
        for (int part = 2; part >= 0; part--)
            sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), _mm512_load_si512(sums[part][t]));
        _mm512_storeu_si512(out + t * PANEL, sum);
    }
}
