"""A tiny model of random weights for every Hugging Face model type that is tested.

Each has two layers, and weights so large that what a token attends to decides its output. test_models.py says what is
asked of them, and bench/huggingface_models.py makes a table of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

BATCH, LENGTH, VOCABULARY, WINDOW = 3, 23, 97, 7
LENGTHS = (LENGTH, LENGTH - 5, 6)  # of padded sequences
PACKED = (9, 1, 13)
VERSION = tuple(int(number) for number in transformers.__version__.split(".")[:2])  # of transformers
IMAGE = LAST = 96  # the token that stands for a piece of an image, or ends the text of a pair

# What a field of a configuration gets, by its name. Two experts of two: no rounding decides who is asked.
SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth"),
        (64, "hidden_size d_model dim n_embd embedding_size projection_dim projection_size word_embed_proj_dim"),
        (64, "codevector_dim lru_width embed_dim out_hidden_size"),
        (96, "intermediate_size d_ff ffn_dim hidden_dim d_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim"),
        (96, "intermediate_size_mlp shared_intermediate_size"),
        (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        (4, "num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads"),
        (4, "decoder_attention_heads mamba_n_heads n_mamba_heads index_n_heads"),
        (2, "num_key_value_heads num_kv_heads linear_num_key_heads linear_num_value_heads linear_num_heads"),
        (16, "head_dim d_kv d_head v_head_dim qk_nope_head_dim kv_channels index_head_dim linear_key_head_dim"),
        (16, "linear_value_head_dim linear_head_dim mamba_d_state mamba_chunk_size chunk_size"),
        (8, "qk_rope_head_dim rotary_dim index_topk patch_size"),
        (24, "q_lora_rank kv_lora_rank image_size"),
        (128, "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions"),
        (128, "max_encoder_position_embeddings max_decoder_position_embeddings"),
        (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
        (WINDOW, "sliding_window window_size local_attention attention_window_size"),
        (2, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok moe_k moe_topk top_k_experts"),
        (1, "n_shared_experts moe_num_shared_experts n_group topk_group"),
        (0.3, "initializer_range init_std initializer_std"),
        (None, "bos_token_id eos_token_id forced_eos_token_id sep_token_id cls_token_id"),
        (0, "pad_token_id decoder_start_token_id num_mtp_layers"),
        (0.0, "router_jitter_noise input_jitter_noise drop_path_rate"),
        (False, "apply_spec_augment"),
        (2, "mlp_ratio type_vocab_size"),
        (4, "query_pre_attn_scalar"),
        (16, "hidden_size_per_layer_input"),
        # Gradients are compared, so no ReLU and no clamp: at their kinks a rounding decides.
        ("gelu", "activation_function"),
        ("gated-gelu", "feed_forward_proj"),
        (1e3, "swiglu_limit"),
    )
    for name in names.split()
}


def tiny(config: str, **more: Any) -> Any:
    """The configuration of that class. Values that can be called are made when it is."""
    kind = getattr(transformers, config)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    chosen = {name: value for name, value in SIZES.items() if name in fields}
    chosen |= {name: 0.0 for name in fields if "drop" in name and name != "token_dropout"}
    chosen |= {name: value() if callable(value) else value for name, value in more.items()}
    return kind(**chosen)


part = functools.partial(functools.partial, tiny)


class Model(NamedTuple):
    """A model type.

    Attributes:
        name: model_type, or that of a variant.
        config, more: class of its configuration and what it has besides SIZES.
        kind: decoder, encoder, encoder-decoder, vision, speech or multimodal.
        auto: the class that makes it.
        layers: how often one forward pass computes attention. 0: Tessera refuses the model, since its attention is one
            of its own, or is told things that Tessera does not know.
        inputs: of its forward pass, by (configuration).
        own_layers: other layers compute an attention of their own; a warning says so.
        quadratic: it has masks of elements, and a warning says so.
    """

    name: str
    config: str
    more: dict[str, Any]
    kind: str
    auto: str
    layers: int
    inputs: Callable[[Any], dict[str, Tensor]]
    own_layers: bool = False
    quadratic: bool = False

    @property
    def there(self) -> bool:
        """Whether this version of transformers has it."""
        return hasattr(transformers, self.config)

    @property
    def refused(self) -> bool:
        return self.layers == 0

    def make(self) -> Any:
        return tiny(self.config, **self.more)


# ---- inputs


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, IMAGE, (batch, length))


def text(config: Any) -> dict[str, Tensor]:
    return {"input_ids": tokens(BATCH, LENGTH)}


def two_texts(config: Any) -> dict[str, Tensor]:
    """What the decoder gets is of another length."""
    return text(config) | {"decoder_input_ids": tokens(BATCH, LENGTH - 4)}


def image(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size)}


def samples(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 300)}


def spectrum(config: Any) -> dict[str, Tensor]:
    """Whisper's is always of one length; the other one halves what it gets twice."""
    if config.model_type == "whisper":
        features = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    else:
        features = torch.randn(BATCH, 4 * LENGTH, config.input_feat_per_channel)
    return {"input_features": features, "decoder_input_ids": tokens(BATCH, LENGTH - 4)}


def text_and_image(config: Any) -> dict[str, Tensor]:
    """The text's last token stands for all of it."""
    inputs = text(config) | image(config.vision_config)
    inputs["input_ids"][:, -1] = LAST
    return inputs


def image_in_text(pieces: int, config: Any) -> dict[str, Tensor]:
    """An image of that many tokens at the end of the text, where no padding is."""
    inputs = text(config) | image(config.vision_config)
    inputs["input_ids"][:, -pieces - 1 : -1] = IMAGE
    if config.model_type == "gemma3":  # images see themselves
        inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    if config.model_type in ("idefics3", "smolvlm"):  # any number of images
        inputs["pixel_values"] = inputs["pixel_values"][:, None]
    return inputs


def patches_in_text(config: Any) -> dict[str, Tensor]:
    """Images of 4 by 4 patches, all in one list; four patches are a token."""
    inputs, size = text(config), config.vision_config.patch_size**2 * 3 * config.vision_config.temporal_patch_size
    inputs["input_ids"][:, -6], inputs["input_ids"][:, -5:-1] = LAST - 1, IMAGE
    return inputs | {
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE).int(), "pixel_values": torch.randn(BATCH * 16, size),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }  # fmt: skip


# ---- the list


def decoder(name: str, config: str, layers: int = 2, **more: Any) -> Model:
    return Model(name, config, more, "decoder", "AutoModelForCausalLM", layers, text)


def encoder(name: str, config: str, layers: int = 2, **more: Any) -> Model:
    return Model(name, config, more, "encoder", "AutoModel", layers, text)


def encoder_decoder(name: str, config: str, layers: int = 6, **more: Any) -> Model:
    return Model(name, config, more, "encoder-decoder", "AutoModelForSeq2SeqLM", layers, two_texts)


def vision(name: str, config: str, layers: int = 2, **more: Any) -> Model:
    return Model(name, config, more, "vision", "AutoModel", layers, image)


def speech(name: str, config: str, layers: int = 2, **more: Any) -> Model:
    more = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8} | more
    return Model(name, config, more | {"num_conv_pos_embedding_groups": 2}, "speech", "AutoModel", layers, samples)


def transcriber(name: str, config: str, layers: int = 6, **more: Any) -> Model:
    return Model(name, config, more, "speech", "AutoModelForSpeechSeq2Seq", layers, spectrum)


def multimodal(name: str, config: str, pieces: int = 9, layers: int = 4, **more: Any) -> Model:
    inputs = functools.partial(image_in_text, pieces)
    return Model(name, config, more, "multimodal", "AutoModelForImageTextToText", layers, inputs)


def patched(name: str, config: str, layers: int, text_config: str, vision_config: str, **more: Any) -> Model:
    """A piece of an image is attended to by itself, so that each is one more attention."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    parts = {"text_config": part(text_config, rope_parameters=rope), "vision_config": part(vision_config, **more)}
    parts |= {"image_token_id": IMAGE, "vision_start_token_id": LAST - 1}
    return Model(name, config, parts, "multimodal", "AutoModelForImageTextToText", layers, patches_in_text)


def pair_of_towers(name: str, config: str, layers: int = 4, **more: Any) -> Model:
    return Model(name, config, more, "multimodal", "AutoModel", layers, text_and_image)


def plain(kind: Callable[..., Model], *layers: int, names: dict[str, str]) -> list[Model]:
    return [kind(name, config, *layers) for name, config in names.items()]


SLIDING_FIRST = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
SHARED_KEYS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * SLIDING_FIRST["layer_types"]}
SSM_FIRST = {"layer_types": ["mamba", "attention"]}
LATENT = {"num_key_value_heads": 4}  # keys of all heads come from one latent vector

MODELS = [
    *plain(decoder, names={
        "gpt2": "GPT2Config", "gpt_bigcode": "GPTBigCodeConfig", "gpt_neox": "GPTNeoXConfig", "opt": "OPTConfig",
        "biogpt": "BioGptConfig", "llama": "LlamaConfig", "mistral": "MistralConfig",
        "ministral3": "Ministral3Config", "mixtral": "MixtralConfig", "qwen2_moe": "Qwen2MoeConfig",
        "qwen3_moe": "Qwen3MoeConfig", "phi": "PhiConfig", "phimoe": "PhimoeConfig", "gemma": "GemmaConfig",
        "cohere": "CohereConfig", "olmo": "OlmoConfig", "olmo2": "Olmo2Config", "olmoe": "OlmoeConfig",
        "starcoder2": "Starcoder2Config", "stablelm": "StableLmConfig", "glm": "GlmConfig", "glm4": "Glm4Config",
        "glm4_moe": "Glm4MoeConfig", "nemotron": "NemotronConfig", "smollm3": "SmolLM3Config",
        "minimax_m2": "MiniMaxM2Config", "ernie4_5": "Ernie4_5Config", "ernie4_5_moe": "Ernie4_5_MoeConfig",
        "helium": "HeliumConfig", "persimmon": "PersimmonConfig", "arcee": "ArceeConfig", "apertus": "ApertusConfig",
        "bitnet": "BitNetConfig", "seed_oss": "SeedOssConfig", "hunyuan_v1_dense": "HunYuanDenseV1Config",
        "jetmoe": "JetMoeConfig", "nanochat": "NanoChatConfig", "flex_olmo": "FlexOlmoConfig",
        "solar_open": "SolarOpenConfig", "hunyuan_v1_moe": "HunYuanMoEV1Config", "internlm3": "InternLM3Config",
        "flint": "FlintConfig",
    }),
    *plain(decoder, 2 if VERSION >= (5, 24) else 0, names={"gptj": "GPTJConfig", "codegen": "CodeGenConfig"}),
    *plain(decoder, 0, names={
        "bloom": "BloomConfig", "falcon": "FalconConfig", "mpt": "MptConfig", "xglm": "XGLMConfig",
        "doge": "DogeConfig",
    }),
    *plain(encoder, names={
        "bert": "BertConfig", "roberta": "RobertaConfig", "distilbert": "DistilBertConfig",
        "electra": "ElectraConfig", "albert": "AlbertConfig", "xlm-roberta": "XLMRobertaConfig",
        "camembert": "CamembertConfig", "ernie": "ErnieConfig", "data2vec-text": "Data2VecTextConfig",
        "nomic_bert": "NomicBertConfig", "eurobert": "EuroBertConfig", "splinter": "SplinterConfig",
        "layoutlm": "LayoutLMConfig", "gte": "GteConfig", "openai_privacy_filter": "OpenAIPrivacyFilterConfig",
    }),
    *plain(encoder, 0, names={
        "mpnet": "MPNetConfig", "deberta": "DebertaConfig", "deberta-v2": "DebertaV2Config",
        "big_bird": "BigBirdConfig", "xlnet": "XLNetConfig",
    }),
    *plain(encoder_decoder, names={
        "bart": "BartConfig", "mbart": "MBartConfig", "marian": "MarianConfig", "pegasus": "PegasusConfig",
        "blenderbot": "BlenderbotConfig", "m2m_100": "M2M100Config", "t5": "T5Config", "mt5": "MT5Config",
        "umt5": "UMT5Config", "plbart": "PLBartConfig", "switch_transformers": "SwitchTransformersConfig",
    }),
    *plain(vision, names={
        "vit": "ViTConfig", "deit": "DeiTConfig", "dinov2": "Dinov2Config",
        "dinov2_with_registers": "Dinov2WithRegistersConfig", "dinov3_vit": "DINOv3ViTConfig", "ijepa": "IJepaConfig",
        "beit": "BeitConfig", "clip_vision_model": "CLIPVisionConfig", "siglip_vision_model": "SiglipVisionConfig",
    }),
    *plain(speech, names={
        "wav2vec2": "Wav2Vec2Config", "hubert": "HubertConfig",
    }),
    decoder("gpt_neo", "GPTNeoConfig", 0, attention_types=[[["global", "local"], 1]]),
    decoder("llama4_text", "Llama4TextConfig", layer_types=["chunked_attention", "full_attention"],
            attention_chunk_size=WINDOW)._replace(quadratic=True),
    decoder("ministral", "MinistralConfig", **SLIDING_FIRST),
    decoder("qwen2", "Qwen2Config", use_sliding_window=True, max_window_layers=1),
    decoder("qwen3", "Qwen3Config", use_sliding_window=True, max_window_layers=1),
    decoder("qwen3_next", "Qwen3NextConfig", 1, **LINEAR_FIRST),
    decoder("phi3", "Phi3Config", original_max_position_embeddings=128),
    decoder("gemma2", "Gemma2Config", attn_logit_softcapping=2.0, **SLIDING_FIRST),
    decoder("gemma3_text", "Gemma3TextConfig", **SLIDING_FIRST),
    decoder("gemma3n_text", "Gemma3nTextConfig", laurel_rank=8, num_kv_shared_layers=0, **SLIDING_FIRST),
    decoder("gemma4_text", "Gemma4TextConfig", **SLIDING_FIRST),
    decoder("gemma3n_text, shared keys", "Gemma3nTextConfig", 4, laurel_rank=8, **SHARED_KEYS),
    decoder("gemma4_text, shared keys", "Gemma4TextConfig", 4, **SHARED_KEYS),
    decoder("vaultgemma", "VaultGemmaConfig", attn_logit_softcapping=2.0, **SLIDING_FIRST),
    decoder("recurrent_gemma", "RecurrentGemmaConfig", 1, block_types=["recurrent", "attention"]),
    decoder("gpt_oss", "GptOssConfig", **SLIDING_FIRST),
    decoder("cohere2", "Cohere2Config", **SLIDING_FIRST),
    decoder("olmo3", "Olmo3Config", **SLIDING_FIRST),
    decoder("granite", "GraniteConfig", attention_multiplier=0.25),
    decoder("granitemoe", "GraniteMoeConfig", attention_multiplier=0.25),
    decoder("granitemoehybrid", "GraniteMoeHybridConfig", 1, attention_multiplier=0.25, **SSM_FIRST),
    decoder("exaone4", "Exaone4Config", **SLIDING_FIRST),
    decoder("deepseek_v2", "DeepseekV2Config", head_dim=8, **LATENT),
    decoder("deepseek_v3", "DeepseekV3Config", first_k_dense_replace=1, **LATENT),
    decoder("minimax", "MiniMaxConfig", 1, block_size=8, **LINEAR_FIRST),
    decoder("jamba", "JambaConfig", 1, attn_layer_period=2, attn_layer_offset=1),
    decoder("bamba", "BambaConfig", 1, attn_layer_indices=[1]),
    decoder("zamba2", "Zamba2Config", 1, layers_block_type=["mamba", "hybrid"]),
    decoder("falcon_h1", "FalconH1Config", mamba_d_ssm=64),
    decoder("kimi_linear", "KimiLinearConfig", 1, **LINEAR_FIRST, **LATENT),
    decoder("longcat_flash", "LongcatFlashConfig", 4, zero_expert_num=0, head_dim=8, **LATENT),
    decoder("lfm2", "Lfm2Config", 1, layer_types=["conv", "full_attention"]),
    decoder("dots1", "Dots1Config", **SLIDING_FIRST),
    decoder("modernbert-decoder", "ModernBertDecoderConfig", bos_token_id=LAST, eos_token_id=LAST, cls_token_id=LAST,
            sep_token_id=LAST, **SLIDING_FIRST),
    decoder("cwm", "CwmConfig", bos_token_id=LAST, **SLIDING_FIRST),
    decoder("youtu", "YoutuConfig", **LATENT),
    decoder("afmoe", "AfmoeConfig", **SLIDING_FIRST),
    decoder("mimo_v2_flash", "MiMoV2FlashConfig", **SLIDING_FIRST),
    decoder("lfm3", "Lfm3Config", 1, layer_types=["conv", "full_attention"]),
    decoder("olmo_hybrid", "OlmoHybridConfig", 1, **LINEAR_FIRST),
    decoder("granitemoeshared", "GraniteMoeSharedConfig", attention_multiplier=0.25),
    decoder("deepseek_v32", "DeepseekV32Config", 0, head_dim=8, **LATENT),
    decoder("glm_moe_dsa", "GlmMoeDsaConfig", 0, head_dim=8, **LATENT),
    decoder("granite_swa", "GraniteSWAConfig", attention_multiplier=0.25, **SLIDING_FIRST),
    decoder("granitemoe_swa", "GraniteMoeSWAConfig", attention_multiplier=0.25, **SLIDING_FIRST),
    decoder("hy_v4", "HYV4Config", 0, head_dim=8, **LATENT),
    decoder("deepseek_v4", "DeepseekV4Config", o_groups=2, o_lora_rank=16),
    decoder("inkling2_text", "Inkling2TextConfig", 0, swa_num_attention_heads=4, swa_num_key_value_heads=2,
            swa_head_dim=16, sliding_window_size=WINDOW, rel_extent=32, d_rel=8),
    decoder("qwen3_5_text", "Qwen3_5TextConfig", 1, **LINEAR_FIRST),
    decoder("diffllama", "DiffLlamaConfig", 4),
    encoder("modernbert", "ModernBertConfig", **SLIDING_FIRST),
    encoder("esm", "EsmConfig", position_embedding_type="rotary"),
    encoder("embedding_gemma2_text", "EmbeddingGemma2TextConfig", **SLIDING_FIRST),
    encoder("longformer", "LongformerConfig", 0, attention_window=8),
    encoder("funnel", "FunnelConfig", 0, block_sizes=[1, 1], block_repeats=[1, 1], architectures=["FunnelModel"]),
    encoder_decoder("t5gemma", "T5GemmaConfig", encoder=part("T5GemmaModuleConfig", **SLIDING_FIRST),
                    decoder=part("T5GemmaModuleConfig", **SLIDING_FIRST), vocab_size=VOCABULARY),
    encoder_decoder("pegasus_x", "PegasusXConfig", 4, block_size=8, num_global_tokens=2)._replace(own_layers=True),
    encoder_decoder("longt5", "LongT5Config", 4, local_radius=3)._replace(own_layers=True),
    encoder_decoder("led", "LEDConfig", 0, attention_window=8),
    speech("wavlm", "WavLMConfig", 0),
    transcriber("whisper", "WhisperConfig", max_source_positions=40),
    transcriber("speech_to_text", "Speech2TextConfig", conv_channels=32, input_feat_per_channel=16),
    pair_of_towers("clip", "CLIPConfig", text_config=part("CLIPTextConfig", eos_token_id=LAST),
                   vision_config=part("CLIPVisionConfig")),
    pair_of_towers("siglip", "SiglipConfig", text_config=part("SiglipTextConfig", max_position_embeddings=LENGTH),
                   vision_config=part("SiglipVisionConfig")),
    multimodal("llava", "LlavaConfig", text_config=part("LlamaConfig"), vision_config=part("CLIPVisionConfig"),
               image_token_index=IMAGE),
    multimodal("paligemma", "PaliGemmaConfig", text_config=part("GemmaConfig"),
               vision_config=part("SiglipVisionConfig"), image_token_index=IMAGE),
    multimodal("gemma3", "Gemma3Config", text_config=part("Gemma3TextConfig", **SLIDING_FIRST),
               vision_config=part("SiglipVisionConfig"), mm_tokens_per_image=9, image_token_index=IMAGE)._replace(
                   quadratic=True),
    multimodal("idefics3", "Idefics3Config", 4, text_config=part("LlamaConfig"),
               vision_config=part("Idefics3VisionConfig", image_size=32), image_token_id=IMAGE),
    multimodal("smolvlm", "SmolVLMConfig", 4, text_config=part("LlamaConfig"),
               vision_config=part("SmolVLMVisionConfig", image_size=32), image_token_id=IMAGE),
    patched("qwen2_vl", "Qwen2VLConfig", 8, "Qwen2VLTextConfig", "Qwen2VLVisionConfig"),
    patched("qwen2_5_vl", "Qwen2_5_VLConfig", 17, "Qwen2_5_VLTextConfig", "Qwen2_5_VLVisionConfig", window_size=16,
            fullatt_block_indexes=[1]),
    patched("qwen3_vl", "Qwen3VLConfig", 8, "Qwen3VLTextConfig", "Qwen3VLVisionConfig", num_position_embeddings=16,
            deepstack_visual_indexes=[0]),
]  # fmt: skip
