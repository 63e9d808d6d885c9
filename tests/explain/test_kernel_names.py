"""How kernels and operators are classified by name, with names from recorded traces and from the libraries' sources."""

from __future__ import annotations

import pytest

from autotune.explain.kernel_names import COLLECTIVE, copy_kind, operator_kind, tensor_core_eligible, tensor_core_used, width_of

KERNELS = [  # name, launching operator, used, eligible, width
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn", "aten::mm", "yes", "yes", "compute_16bit"),
    ("volta_fp16_s884gemm_fp16_64x128_ldg8_f2f_nn", "aten::mm", "yes", "yes", "compute_16bit"),
    ("turing_h1688gemm_128x128_ldg8_nn", "aten::mm", "yes", "yes", "compute_16bit"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "", "yes", "yes", "compute_16bit"),
    ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x4_nn_align1>(P)", "aten::bmm", "yes", "yes", "compute_32bit"),
    ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized>", "", "yes", "yes", "compute_16bit"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", "", "yes", "yes", "compute_16bit"),
    ("ampere_sgemm_128x64_nn", "aten::mm", "no", "yes", "compute_32bit"),
    ("void cutlass::Kernel<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(P)", "aten::mm", "no", "yes", "compute_32bit"),
    ("cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", "", "no", "yes", "compute_32bit"),
    ("void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false>", "aten::convolution_backward", "no", "yes", "compute_32bit"),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x32x8_stage3_ffma_aligna4", "aten::mm", "no", "yes", "compute_32bit"),
    ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", "", "no", "yes", "compute_32bit"),
    ("sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize256x64x32", "", "yes", "yes", "compute_32bit"),
    ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "aten::add", "no", "no", "compute_32bit"),
    ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2>", "aten::cudnn_batch_norm_backward", "no", "no", "compute_32bit"),
    ("void at::native::elementwise_kernel<128, BinaryFunctor<c10::Half, c10::Half>>", "", "no", "no", "compute_16bit"),
    ("void cublasLt::epilogue::impl::globalKernel<8, 32, float>(int)", "aten::addmm", "no", "no", "compute_32bit"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "record_param_comms", "no", "no", "compute_16bit"),
    ("triton_poi_fused_relu_0", "", "no", "no", "compute_unknown"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "", "yes", "yes", "compute_16bit"),
    ("nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "", "yes", "yes", "compute_16bit"),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "", "yes", "yes", "compute_16bit"),
    ("nvjet_sm90_sss_128x256_TNT", "", "yes", "yes", "compute_unknown"),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
     "cutlass::bfloat16_t>>>", "flash_attn_3::fwd", "yes", "yes", "compute_16bit"),
    ("void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2, cutlass::bfloat16_t>>>", "", "yes", "yes",
     "compute_16bit"),
    ("void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cutlass::bfloat16_t>>", "", "unknown", "unknown",
     "compute_16bit"),
    ("void flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128, 128, 12, 2, cutlass::bfloat16_t, 128>>", "", "yes", "yes",
     "compute_16bit"),
    ("void cutlass::device_kernel<GemmUniversal<MainloopSm90TmaGmmaWarpSpecialized, float_e4m3_t, Copy_Atom>>", "", "yes",
     "yes", "compute_16bit"),
    ("triton_tem_fused_flex_attention_backward_2", "", "unknown", "yes", "compute_unknown"),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", "", "unknown", "yes", "compute_16bit"),
    ("ampere_gcgemm_64x64_nt", "aten::cudnn_convolution", "no", "yes", "compute_32bit"),
    ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24>", "", "no", "no", "compute_16bit"),
    ("void fbgemm_gpu::permute_indices_weights_kernel<false, int>", "fbgemm::permute_sparse_features", "unknown", "no",
     "compute_unknown"),
    ("void at::native::upsample_bilinear2d_out_frame<c10::BFloat16>", "aten::upsample_bilinear2d", "unknown", "no",
     "compute_16bit"),
    ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>", "", "no", "no", "compute_16bit"),
    ("my_own_kernel", "", "unknown", "unknown", "compute_unknown"),
    ("my_own_kernel", "aten::mm", "unknown", "yes", "compute_unknown"),
    ("my_own_kernel", "mylib::op", "unknown", "no", "compute_unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "operator", "used", "eligible", "width"), KERNELS)
def test_kernels_are_recognised_and_unknown_ones_stay_unknown(
    kernel: str, operator: str, used: str, eligible: str, width: str
) -> None:
    assert (tensor_core_used(kernel), tensor_core_eligible(kernel, operator), width_of(kernel)) == (used, eligible, width)


@pytest.mark.parametrize(
    ("types", "width"),
    [
        (("float", "Scalar"), "compute_32bit"),
        (("c10::Half", "float"), "compute_16bit"),
        (("long int",), "compute_unknown"),
        ((), "compute_unknown"),
    ],
)
def test_precision_comes_from_the_operator_types_if_the_kernel_name_lacks_it(types: tuple[str, ...], width: str) -> None:
    assert width_of("cunn_SoftMaxForward", types) == width


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mkldnn_convolution", "convolution"), ("aten::conv2d", "convolution"), ("aten::addmm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"), ("aten::native_layer_norm", "normalisation"),
        ("aten::max_pool2d_with_indices", "pooling"), ("aten::nll_loss_forward", "loss"), ("aten::copy_", "copy and layout"),
        ("aten::add_", "elementwise"), ("aten::sum", "reduction"), ("AddmmBackward0", "autograd"),
        ("c10d::allreduce_", "collective"), ("aten::item", "copy and layout"), ("_c10d_functional::wait_tensor", "collective"),
        ("_c10d_functional::reduce_scatter_tensor", "collective"), ("aten::_cudnn_rnn_backward", "matmul"),
        ("flash_attn::_flash_attn_backward", "attention"), ("flash_attn_3::fwd", "attention"),
        ("FlashAttnVarlenFuncBackward", "attention"), ("MyFunctionBackward", "custom operator"),
        ("aten::upsample_bilinear2d", "elementwise"), ("aten::_upsample_bilinear2d_aa_backward", "elementwise"),
        ("aten::linear_backward", "matmul"), ("aten::_softmax", "normalisation"), ("aten::_log_softmax", "loss"),
        ("Torch-Compiled Region: 0/0", "compiled"), ("mylib::op", "custom operator"), ("aten::native_dropout", "random"),
        ("aten::embedding", "embedding and indexing"),
    ],
)  # fmt: skip
def test_operators_are_classified_by_what_they_compute(operator: str, kind: str) -> None:
    assert operator_kind(operator) == kind


@pytest.mark.parametrize(
    "kernel",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclSymkDevKernel_AllReduce_RSxLD_sum_bf16", "multimem_all_reduce_kernel",
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>", "oneShotAllReduceKernel<4>",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8>", "void vllm::cross_device_reduce_1stage<__half, 8>",
        "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*)",
    ],
)  # fmt: skip
def test_kernels_that_communicate_are_recognised(kernel: str) -> None:
    assert COLLECTIVE.search(kernel)
    assert not COLLECTIVE.search("void at::native::reduce_kernel<512, 1>")


def test_copies_are_classified_by_direction() -> None:
    names = (
        "Memcpy DtoH (Device -> Pageable)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy PtoP",
    )
    assert [copy_kind(name) for name in names] == ["d2h", "h2d", "d2d", "d2d"]
