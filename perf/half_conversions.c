/* Conversions between half and float in one instruction each, for checking on x86-64 Linux.
 *
 * Core AI's Linux runtime computes float16 one number at a time and calls libgcc for every
 * conversion: 95 % of its time. These give the same bits four times as fast:
 *
 *     cc -O2 -shared -fPIC -o half_conversions.so perf/half_conversions.c
 *     LD_PRELOAD=$PWD/half_conversions.so python -m perf.export exported/ai
 *
 * A processor without F16C (before 2012) stops at an illegal instruction.
 */

/* Argument and result are where the ABI has them, in the low bits of xmm0. */
__asm__(".globl __extendhfsf2\n"
        ".type __extendhfsf2, @function\n"
        "__extendhfsf2:\n"
        "    vcvtph2ps %xmm0, %xmm0\n"
        "    ret\n"
        ".globl __truncsfhf2\n"
        ".type __truncsfhf2, @function\n"
        "__truncsfhf2:\n"
        "    vcvtps2ph $0, %xmm0, %xmm0\n" /* to the nearest, ties to even */
        "    ret\n");
