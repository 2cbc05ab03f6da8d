"""Lists of request fields that other servers know and this one does not implement.

Sources: the APIs of OpenAI and Anthropic, and the extensions of vLLM, SGLang, llama.cpp, z.ai and OpenRouter.
"""

from __future__ import annotations

from collections.abc import Mapping

from glm5.serve.fields import Refused, no

TEXT_ONLY = "the model reads text only"
NO_STORE = "this server keeps nothing between requests; send the whole conversation"

HOSTED = frozenset(
    """user user_id metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
    prompt_cache_retention prompt_cache_breakpoint prediction verbosity moderation priority request_id rid session_id
    provider route models transforms plugins usage extra_headers access_programs
    cache_control vllm_xargs kv_transfer_params stream_interval data_parallel_rank routed_dp_rank bootstrap_host
    bootstrap_port bootstrap_room log_metrics custom_params cache_prompt id_slot
    guided_decoding_backend tool_stream stream_reasoning spaces_between_special_tokens timings_per_token
    return_progress mm_processor_kwargs media_io_kwargs""".split()
)
"""Client metadata and service options: storage, queue, caches and transport."""

SAMPLER_DETAILS = frozenset(
    """mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold
    dynatemp_exponent repeat_last_n length_penalty early_stopping smoothing_curve""".split()
)
"""Parameters of `SAMPLERS`, without meaning on their own."""

SAMPLERS: Mapping[str, Refused] = {
    "typical_p": no(1),
    "tfs_z": no(1),
    "top_a": no(0),
    "top_n_sigma": no(-1, 0),
    "mirostat": no(0),
    "dry_multiplier": no(0),
    "xtc_probability": no(0),
    "dynatemp_range": no(0),
    "smoothing_factor": no(0),
    "epsilon_cutoff": no(0),
    "eta_cutoff": no(0),
    "repeat_penalty": no(1, instead="use repetition_penalty"),
    "use_beam_search": no(False),
    "samplers": no([]),
    "custom_logit_processor": no(""),
    "logits_processors": no([]),
    "repetition_detection": no(),
    "min_keep": no(0, 1),
}
"""Samplers that change which tokens are drawn."""

REPORTS: Mapping[str, Refused] = {
    "prompt_logprobs": no(0, False, instead="use echo with logprobs on /v1/completions, or /generate"),
    "logprob_token_ids": no([]),
    "token_ids_logprob": no([]),
    "n_probs": no(0, instead="use logprobs"),
    "post_sampling_probs": no(False),
    "return_tokens_as_token_ids": no(False, instead="use return_token_ids"),
    "return_prompt_token_ids": no(False, instead="use return_token_ids"),
    "return_prompt_text": no(False),
    "return_hidden_states": no(False),
    "return_routed_experts": no(False),
    "return_indexer_topk": no(False),
    "return_meta_info": no(False),
    "return_cached_tokens_details": no(False),
    "routed_experts_prompt_start": no(0),
}
"""Extra information in an answer besides its text."""

PROMPTS: Mapping[str, Refused] = {
    "truncate_prompt_tokens": no(instead="shorten the prompt"),
    "prompt_embeds": no(),
    "input_embeds": no(),
    "image_data": no([], instead=TEXT_ONLY),
    "video_data": no([], instead=TEXT_ONLY),
    "audio_data": no([], instead=TEXT_ONLY),
    "lora_path": no(),
    "lora": no([]),
    "n_keep": no(0),
}
"""Changes to the prompt or the model."""

ENDINGS: Mapping[str, Refused] = {
    "stop_regex": no([], "", instead="use stop"),
    "structural_tag": no("", instead="use a JSON schema, a grammar, or tools with tool_choice"),
    "n_predict": no(-1, instead="use max_tokens"),
    "t_max_predict_ms": no(0, -1),
}
"""How an answer ends, or its form."""

COMMON: Mapping[str, Refused] = {**SAMPLERS, **REPORTS, **PROMPTS, **ENDINGS}
