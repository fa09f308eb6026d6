/* The table of an instruction set that is made of lanes_*.h: the last part of its file. */
const en_isa ISA_TABLE = {
    .name = ISA_NAME,
    .usable = usable,
    .matmul = {[EN_PACKED_F32] = matmul_f32, [EN_PACKED_F16] = matmul_f16, [EN_PACKED_Q4_0] = matmul_q4_0,
               [EN_PACKED_Q4_1] = matmul_q4_1, [EN_PACKED_Q5_0] = matmul_q5_0, [EN_PACKED_Q5_1] = matmul_q5_1,
               [EN_PACKED_Q8_0] = matmul_q8_0, [EN_PACKED_Q4_K] = matmul_q4_k, [EN_PACKED_Q5_K] = matmul_q5_k,
               [EN_PACKED_Q6_K] = matmul_q6_k},
    .quantize = quantize,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .to_half = to_half,
    .half_to_float = half_to_float,
    .keys_from_int8 = keys_from_int8,
    .values_from_int8 = values_from_int8,
    .attend = attend,
};
