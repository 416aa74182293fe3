"""The environment variables that vLLM documents and Ferrule has no variable of its own for: one row each."""

from __future__ import annotations

from dataclasses import dataclass

_SWITCH = {"": "0", "false": "0", "true": "1"}  # other ways to write a switch


@dataclass(frozen=True)
class Foreign:
    """One variable of vLLM. One of the last three fields is set, which is its class.

    `default` is the documented one ("": not set), for which nothing is said; None: nothing is ever said.
    """

    name: str
    type: str  # "switch" (0 or 1), "number", "text"
    default: str | None
    meaning: str
    inert: str = ""  # why it has no effect here
    missing: str = ""  # the feature that it sets and that is not in this build: another value stops the start
    option: str = ""  # the option that gets its value

    @property
    def standing(self) -> str:
        """Its class, as that of an option."""
        return "without effect" if self.inert else "not in this build" if self.missing else "replaced"

    def differs(self, text: str) -> bool:
        """Return whether a value differs in meaning from the default."""
        value = text.strip().lower()
        if not value or self.default is None:
            return False
        return _SWITCH.get(value, value) != self.default.lower()


FOREIGN = (
    Foreign(
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "switch",
        "0",
        "keep the responses of /v1/responses",
        inert="they are kept unless a request has store false, within the bounds of --response-store",
    ),
    Foreign("VLLM_DO_NOT_TRACK", "switch", None, "collect no usage data", inert="no usage data is collected"),
    Foreign("VLLM_NO_USAGE_STATS", "switch", None, "collect no usage data", inert="no usage data is collected"),
    Foreign("VLLM_USAGE_SOURCE", "text", None, "label of usage data", inert="no usage data is collected"),
    Foreign("VLLM_USAGE_STATS_SERVER", "text", None, "where usage data is sent", inert="no usage data is collected"),
    Foreign("VLLM_USE_V1", "switch", "1", "which engine runs", inert="there is one engine"),
    Foreign(
        "VLLM_TARGET_DEVICE",
        "text",
        "",
        "platform to build for or run on",
        inert="the platform is detected, or named by --device",
    ),
    Foreign("VLLM_TEST_FORCE_LOAD_FORMAT", "text", "dummy", "load format in tests", inert="it is for vLLM's own tests"),
    Foreign(
        "VLLM_TEST_DYNAMO_FULLGRAPH_CAPTURE",
        "switch",
        "1",
        "full-graph capture in tests",
        inert="it is for vLLM's own tests",
    ),
    Foreign("VLLM_CI_USE_S3", "switch", "0", "read models from S3 in tests", inert="it is for vLLM's own tests"),
    Foreign(
        "VLLM_WORKER_MULTIPROC_METHOD",
        "text",
        "spawn",
        "how worker processes are started",
        inert="processes are always spawned",
    ),
    Foreign(
        "VLLM_RPC_TIMEOUT",
        "number",
        "",
        "milliseconds to wait for the engine",
        inert="clients are notified when the engine exits",
    ),
    Foreign(
        "VLLM_RINGBUFFER_WARNING_INTERVAL",
        "number",
        "60",
        "seconds between warnings about a full ring buffer",
        inert="clients are notified when the engine exits",
    ),
    Foreign("VLLM_CONFIG_ROOT", "text", "", "folder of configuration files", inert="no files are written there"),
    Foreign("VLLM_CACHE_ROOT", "text", "", "folder of caches", inert="no files are written there"),
    Foreign("VLLM_ASSETS_CACHE", "text", "", "folder of downloaded assets", inert="no files are written there"),
    Foreign("VLLM_XLA_CACHE_PATH", "text", "", "folder of the XLA cache", inert="no files are written there"),
    Foreign(
        "VLLM_LOG_BATCHSIZE_INTERVAL",
        "number",
        "-1",
        "seconds between log lines about batch sizes",
        inert="the figures are in /metrics",
    ),
    Foreign(
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE",
        "number",
        "128",
        "outputs that are processed per turn",
        inert="outputs are processed as they come",
    ),
    Foreign(
        "VLLM_LOGITS_PROCESSOR_THREADS",
        "number",
        "",
        "threads for logits processors",
        inert="outputs are processed as they come",
    ),
    Foreign("VLLM_IMAGE_FETCH_TIMEOUT", "number", "5", "seconds to fetch an image", inert="no media are read"),
    Foreign("VLLM_VIDEO_FETCH_TIMEOUT", "number", "30", "seconds to fetch a video", inert="no media are read"),
    Foreign("VLLM_AUDIO_FETCH_TIMEOUT", "number", "10", "seconds to fetch audio", inert="no media are read"),
    Foreign("VLLM_MM_INPUT_CACHE_GIB", "number", "8", "GiB of cached multimodal inputs", inert="no media are read"),
    Foreign("VLLM_SKIP_P2P_CHECK", "switch", "1", "do not test peer-to-peer access", inert="there is one device"),
    Foreign("VLLM_NCCL_SO_PATH", "text", "", "path of the NCCL library", inert="there is one device"),
    Foreign("VLLM_CUDART_SO_PATH", "text", "", "path of the CUDA runtime library", inert="there is one device"),
    Foreign("VLLM_DP_MASTER_IP", "text", "", "address of the first data-parallel node", inert="there is one device"),
    Foreign("VLLM_DP_MASTER_PORT", "number", "", "port of the first data-parallel node", inert="there is one device"),
    Foreign("VLLM_RAY_PER_WORKER_GPUS", "number", "1.0", "GPUs per Ray worker", inert="there is no Ray executor"),
    Foreign(
        "VLLM_RAY_BUNDLE_INDICES",
        "text",
        "",
        "placement-group bundles of Ray workers",
        inert="there is no Ray executor",
    ),
    Foreign("VLLM_USE_RAY_SPMD_WORKER", "switch", "0", "SPMD workers under Ray", inert="there is no Ray executor"),
    Foreign("VLLM_USE_RAY_COMPILED_DAG", "switch", "0", "compiled graph under Ray", inert="there is no Ray executor"),
    Foreign(
        "VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL",
        "switch",
        "1",
        "NCCL channels in Ray's compiled graph",
        inert="there is no Ray executor",
    ),
    Foreign(
        "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM",
        "switch",
        "0",
        "overlapped communication in Ray's compiled graph",
        inert="there is no Ray executor",
    ),
    Foreign(
        "VLLM_USE_TRITON_FLASH_ATTN",
        "switch",
        "1",
        "Triton flash attention on ROCm",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_FLASH_ATTN_VERSION",
        "number",
        "",
        "version of flash attention",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_USE_FLASHINFER_SAMPLER",
        "switch",
        "0",
        "sampler of FlashInfer",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_FLASHINFER_FORCE_TENSOR_CORES",
        "switch",
        "0",
        "tensor cores in FlashInfer",
        inert="there is no such kernel or platform",
    ),
    Foreign("VLLM_MLA_DISABLE", "switch", "0", "no MLA attention", inert="there is no such kernel or platform"),
    Foreign(
        "VLLM_USE_TRITON_AWQ", "switch", "0", "Triton kernels for AWQ", inert="there is no such kernel or platform"
    ),
    Foreign(
        "VLLM_MARLIN_USE_ATOMIC_ADD",
        "switch",
        "0",
        "atomic additions in Marlin kernels",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_ROCM_FP8_PADDING",
        "switch",
        "1",
        "padding of fp8 weights on ROCm",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_DISABLED_KERNELS", "text", "", "kernels that are not used", inert="there is no such kernel or platform"
    ),
    Foreign(
        "VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON",
        "number",
        "0",
        "Triton kernel for the alignment of experts",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_FUSED_MOE_CHUNK_SIZE",
        "number",
        "32768",
        "tokens per chunk of fused experts",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_TEST_FORCE_FP8_MARLIN",
        "switch",
        "0",
        "Marlin kernels for fp8 in tests",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH",
        "switch",
        "1",
        "contiguous cache on HPU",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_TPU_DISABLE_TOPK_TOPP_OPTIMIZATION",
        "switch",
        "0",
        "plain top-k and top-p on TPU",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_CPU_MOE_PREPACK", "switch", "1", "packed experts on CPU", inert="there is no such kernel or platform"
    ),
    Foreign("VLLM_OPENVINO_DEVICE", "text", "CPU", "OpenVINO device", inert="there is no such kernel or platform"),
    Foreign(
        "VLLM_OPENVINO_KVCACHE_SPACE",
        "number",
        "0",
        "GiB of KV cache under OpenVINO",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_OPENVINO_CPU_KV_CACHE_PRECISION",
        "text",
        "",
        "type of the KV cache under OpenVINO",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS",
        "switch",
        "0",
        "quantized weights under OpenVINO",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_XLA_CHECK_RECOMPILATION",
        "switch",
        "0",
        "check for recompilation under XLA",
        inert="there is no such kernel or platform",
    ),
    Foreign(
        "VLLM_V0_USE_OUTLINES_CACHE",
        "switch",
        "0",
        "cache of Outlines on disk",
        inert="there is no such kernel or platform",
    ),
    Foreign("VLLM_USE_MODELSCOPE", "switch", "0", "download models from ModelScope", missing="other model hubs"),
    Foreign("VLLM_PP_LAYER_PARTITION", "text", "", "layers of each pipeline stage", missing="pipeline parallelism"),
    Foreign("VLLM_DP_RANK", "number", "0", "data-parallel rank", missing="data parallelism"),
    Foreign("VLLM_DP_SIZE", "number", "1", "number of data-parallel ranks", missing="data parallelism"),
    Foreign(
        "VLLM_LORA_RESOLVER_CACHE_DIR",
        "text",
        "",
        "folder of adapters that requests may name",
        option="lora_resolver_cache_dir",
    ),
    Foreign(
        "VLLM_LORA_RESOLVER_HF_REPO_LIST",
        "text",
        "",
        "repositories of adapters that requests may name",
        option="lora_resolver_hf_repo_list",
    ),
    Foreign("VLLM_TRACE_FUNCTION", "switch", "0", "trace function calls", missing="tracing of calls"),
    Foreign(
        "VLLM_ENGINE_ITERATION_TIMEOUT_S", "number", "60", "seconds that a step may take", option="watchdog_timeout"
    ),
)
