"""Arguments of vLLM's engine about its own machinery. They have no equivalent here and change no answer.

Their default is accepted, because it asks for what happens anyway. Other values are refused with the reason of their
group, because a user who sets one expects an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NO: Final = (False,)
_ANY: Final = (True, False)
_AUTO: Final = ("auto",)
_UNSET: Final = ()
"""Only None, which counts as absent."""

GROUPS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "kernels are chosen for the machine when the engine is loaded; leave it out": {
        "moe_backend": _AUTO, "linear_backend": _AUTO, "sparse_indexer_topk_backend": _AUTO,
        "attention_backend": _UNSET, "attention_config": _UNSET, "kernel_config": _UNSET, "ir_op_priority": _UNSET,
        "enable_flashinfer_autotune": _ANY, "monokernel": _NO, "gdn_prefill_backend": _UNSET,
        "kda_prefill_backend": _UNSET, "kda_decode_backend": _UNSET, "disable_cascade_attn": _ANY,
        "use_fp64_gumbel": _NO, "override_attention_dtype": _UNSET,
    },
    "the builder decides about graphs and passes; leave it out": {
        "cudagraph_capture_sizes": _UNSET, "max_cudagraph_capture_size": _UNSET, "cuda_graph_sizes": _UNSET,
        "optimization_level": (0, 1, 2, 3), "performance_mode": ("balanced",), "cudagraph_metrics": _NO,
        "max_seq_len_to_capture": (8192,), "disable_async_output_proc": _ANY,
    },
    "convert-checkpoint divides a model over ranks, and adaptrt.serve.ray over machines; leave it out": {
        "master_addr": ("127.0.0.1",), "master_port": (29501,), "nnodes": (1,), "node_rank": (0,),
        "distributed_timeout_seconds": _UNSET, "cpu_distributed_timeout_seconds": _UNSET, "numa_bind": _NO,
        "numa_bind_nodes": _UNSET, "numa_bind_cpus": _UNSET,
        "prefill_context_parallel_size": (1,), "decode_context_parallel_size": (1,), "dcp_comm_backend": _UNSET,
        "dcp_q_replicate": _UNSET,
        "dcp_kv_cache_interleave_size": (1,), "cp_kv_cache_interleave_size": _UNSET, "data_parallel_rank": _UNSET,
        "data_parallel_start_rank": _UNSET, "data_parallel_size_local": _UNSET, "data_parallel_address": _UNSET,
        "data_parallel_rpc_port": _UNSET, "data_parallel_hybrid_lb": _NO, "data_parallel_external_lb": _NO,
        "data_parallel_multi_port_external_lb": _NO, "data_parallel_backend": ("mp",), "enable_hc_sp": _NO,
        "enable_batch_sharded_sampling": _NO, "enable_ep_weight_filter": _NO,
        "all2all_backend": ("allgather_reducescatter",), "enable_elastic_ep": _NO, "elastic_ep_max_dp_size": _UNSET,
        "enable_dbo": _NO, "ubatch_size": (0,), "dbo_decode_token_threshold": (32,), "dp_sync_interval": (16,),
        "dbo_prefill_token_threshold": (512,), "disable_nccl_for_dp_synchronization": _ANY, "eplb_config": _UNSET,
        "enable_eplb": _NO, "expert_placement_strategy": ("linear",), "num_redundant_experts": (0,),
        "eplb_window_size": (1000,), "eplb_step_interval": (3000,), "eplb_log_balancedness": _NO,
        "ray_workers_use_nsight": _NO, "worker_cls": _AUTO, "worker_extension_cls": ("",),
        "enable_shm_tensor_arena": _NO, "enable_fault_tolerance": _NO, "fault_tolerance_config": _UNSET,
        "enable_nccl_comm_suspend": _NO, "enable_multimodal_encoder_data_parallel": _NO,
    },
    "a model's files are read once, in their own format; leave it out": {
        "model_weights": ("",), "hf_config_path": _UNSET, "safetensors_load_strategy": _UNSET,
        "safetensors_prefetch_num_threads": _UNSET, "safetensors_prefetch_block_size": _UNSET,
        "max_parallel_loading_workers": _UNSET, "model_loader_extra_config": ({},),
        "ignore_patterns": (["original/**/*"],),
        "use_tqdm_on_load": _ANY, "pt_load_map_location": ("cpu",), "model_class_overrides": ({},),
        "weight_transfer_config": _UNSET,
    },
    "images are read in one way, and models write text; leave it out": {
        "allowed_local_media_path": ("",), "allowed_media_domains": _UNSET, "language_model_only": _ANY,
        "enable_mm_embeds": _NO, "interleave_mm_strings": _NO, "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
        "mm_processor_cache_gb": (0, 4), "mm_processor_cache_type": ("lru",), "mm_hasher_algorithm": ("blake3",),
        "mm_shm_cache_max_object_size_mb": (128,), "mm_encoder_only": _NO, "mm_encoder_tp_mode": ("weights",),
        "mm_encoder_attn_backend": _UNSET, "mm_encoder_attn_dtype": _UNSET, "mm_encoder_fp8_scale_path": _UNSET,
        "mm_encoder_fp8_scale_save_path": _UNSET, "mm_encoder_fp8_scale_save_margin": (1.5,),
        "skip_mm_profiling": _ANY, "video_pruning_rate": _UNSET, "video_pruning_method": ("evs",),
        "mm_tensor_ipc": ("direct_rpc",), "mm_processor_device": _AUTO, "mm_ipc_gpu_memory_gb": (0,),
        "mm_device_do_normalize": (True,), "default_mm_loras": _UNSET, "enable_tower_connector_lora": _NO,
        "disable_chunked_mm_input": _NO, "disable_mm_preprocessor_cache": _ANY, "enable_mm_processor_stats": _NO,
        "ec_transfer_config": _UNSET, "ec_manager_config": _UNSET,
    },
    "the KV cache manages its blocks and prefixes itself; leave it out": {
        "prefix_caching_hash_algo": ("sha256", "builtin"), "prefix_cache_retention_interval": (0,),
        "disable_hybrid_kv_cache_manager": _ANY, "kv_sharing_fast_prefill": _NO, "swa_bounded_replay": (True,),
        "kv_cache_dtype_skip_layers": ([],), "calculate_kv_scales": _NO, "prefix_match_unit": _UNSET,
        "mamba_cache_dtype": _AUTO, "mamba_ssm_cache_dtype": _AUTO, "mamba_block_size": _UNSET,
        "mamba_cache_mode": _UNSET, "enable_mamba_shared_prefix_checkpoint": _NO, "replayssm_buffer_len": (16,),
        "use_replayssm": _NO, "mamba_backend": ("triton",), "mamba_ssu_algorithm": _UNSET, "mamba_config": _UNSET,
        "enable_mamba_cache_stochastic_rounding": _NO, "mamba_cache_philox_rounds": (0,), "engram_config": _UNSET,
        "kv_events_config": _UNSET,
    },
    "weight_memory limits how much of a model is in memory; leave it out": {
        "offload_backend": _AUTO, "cpu_offload_params": (set(),), "offload_group_size": (0,),
        "offload_num_in_group": (1,), "offload_prefetch_step": (1,), "offload_params": (set(),),
        "kv_offloading_size": _UNSET, "kv_offloading_backend": ("native",), "enable_cumem_allocator": _NO,
        "sleep_mode_backend": ("cumem",), "sleep_mode_offload_cudagraph": _NO, "sleep_preserve_parameter_names": ([],),
    },
    "the scheduler fills each step up to max_num_batched_tokens; leave it out": {
        "max_num_scheduled_tokens": _UNSET, "long_prefill_token_threshold": (0,),
        "long_prefill_token_threshold_adaptive": _NO, "max_num_active_seqs": _UNSET, "max_num_partial_prefills": (1,),
        "max_long_partial_prefills": (1,), "scheduler_reserve_full_isl": (True,), "prefill_schedule_interval": (1,),
        "watermark": (0,), "scheduler_cls": _UNSET, "num_lookahead_slots": (0,), "stream_interval": (1,),
        "preemption_mode": _UNSET,
    },
    "the queue is bounded by max_queue_size (ExecutorConfig); leave it out": {
        "max_num_queued_reqs": _UNSET, "max_num_queued_tokens": _UNSET,
    },
    "an adapter's files say what it changes; leave it out": {
        "lora_target_modules": _UNSET, "specialize_active_lora": _ANY, "enable_mixed_moe_lora_format": _ANY,
        "enable_moe_shared_loras": _ANY, "max_lora_cls_labels": _UNSET, "enable_lora_bias": _ANY,
        "enable_prompt_adapter": _NO, "max_prompt_adapters": _UNSET, "max_prompt_adapter_token": _UNSET,
    },
    "metrics and logs have one form, see docs/serving-metrics.md; leave it out": {
        "show_hidden_metrics_for_version": _UNSET, "otlp_traces_endpoint": _UNSET, "collect_detailed_traces": _UNSET,
        "per_request_spec_decode_metrics": ("none",), "kv_cache_metrics": _NO, "kv_cache_metrics_sample": (0.01,),
        "custom_histogram_buckets": _UNSET, "enable_layerwise_nvtx_tracing": _NO, "enable_mfu_metrics": _NO,
        "enable_logging_iteration_details": _NO, "jit_monitor_mode": ("warn",), "jit_monitor_verbose": _NO,
        "profiler_config": _UNSET, "logging_config": _UNSET, "log_level": _UNSET, "log_config_file": _UNSET,
        "aggregate_engine_logging": _NO, "watchdog_config": _UNSET, "fail_on_environ_validation": _ANY,
    },
    "log probs are those of the model before sampling": {"logprobs_mode": ("raw_logprobs",)},
    "drafts are configured by speculative_config of LLM(), or by --draft-model; leave it out": {
        "spec_method": _UNSET, "spec_model": _UNSET, "spec_tokens": _UNSET,
    },
    "a quantised model says so in its config.json; leave it out": {
        "quantization_config": _UNSET, "allow_deprecated_quantization": _ANY,
    },
    "attention windows are fixed by the model": {"disable_sliding_window": _NO},
    "completions have no data about experts and masks; leave it out": {
        "enable_return_routed_experts": _NO, "return_sampling_mask": _NO, "aux_output_config": _UNSET,
        "enable_trace_replay": _NO,
    },
    "texts have no watermarks": {"watermark_config": _UNSET},
    "models of diffusion are not supported": {"diffusion_config": _UNSET},
    "a Request of the executor takes prompt_embedding_table": {"enable_prompt_embeds": _NO},
    "no plugin is known here": {
        "io_processor_plugin": _UNSET, "reasoning_parser_plugin": _UNSET, "reasoning_config": _UNSET,
        "additional_config": ({},), "logits_processor_pattern": _UNSET,
    },
    "use --pooling-type of serve, or pooling_type of LLM.embed()": {
        "pooler_config": _UNSET, "override_pooler_config": _UNSET,
    },
    "llguidance compiles all guides; leave it out": {
        "guided_decoding_disable_fallback": _ANY, "guided_decoding_disable_any_whitespace": _NO,
        "guided_decoding_disable_additional_properties": _NO,
    },
    "threads for texts are set by --text-threads of serve": {"renderer_num_workers": (1,), "tokens_only": _NO},
    "use --shutdown-seconds of serve": {"shutdown_timeout": (0,)},
}  # fmt: skip
"""Accepted values by name, in groups of one reason."""
