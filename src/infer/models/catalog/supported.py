"""The families of models that load, by maker and age, and the tests of each. Loads no torch."""

import json
from pathlib import Path
from typing import NamedTuple


class SupportedModels(NamedTuple):
    """Models of one family. If tests run published files, `published` names their models."""

    model_type: str  # the value in configs
    models: str
    published: str | None = None

    @property
    def proof(self) -> str:
        return f"random weights and {self.published}" if self.published else "random weights"


def proven_settings() -> dict[str, list[str]]:
    """Return the settings of each family that tests compare with `transformers`. They write the file."""
    text = Path(__file__).with_name("proven_settings.json").read_text(encoding="utf-8")
    settings: dict[str, list[str]] = json.loads(text)
    return settings


SUPPORTED = (
    SupportedModels("llama", "Llama 2 and 3, SmolLM2", "SmolLM2 135M"),
    SupportedModels("llama4_text", "Llama 4 (text, also inside the multimodal models)"),
    SupportedModels("smollm3", "SmolLM3"),
    SupportedModels("qwen2", "Qwen2, Qwen2.5", "Qwen2.5-Coder 0.5B"),
    SupportedModels("qwen2_moe", "Qwen2-MoE, Qwen1.5-MoE"),
    SupportedModels("qwen3", "Qwen3"),
    SupportedModels("qwen3_moe", "Qwen3-MoE (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B)"),
    SupportedModels("qwen3_next", "Qwen3-Next"),
    SupportedModels("qwen3_5_text", "Qwen3.5, Qwen3.6 (text, also inside the multimodal models)"),
    SupportedModels("qwen3_5_moe_text", "Qwen3.5-MoE, Qwen3.6-MoE (text, also inside the multimodal models)"),
    SupportedModels("gemma", "Gemma, CodeGemma"),
    SupportedModels("gemma2", "Gemma 2"),
    SupportedModels("vaultgemma", "VaultGemma"),
    SupportedModels(
        "gemma3_text",
        "Gemma 3 (text, also inside the multimodal models), EmbeddingGemma",
        "Gemma 3 270M, EmbeddingGemma",
    ),
    SupportedModels("gemma4_text", "Gemma 4 E2B, E4B, 26B-A4B, 31B (text, also inside the multimodal models)"),
    SupportedModels("gemma4_unified_text", "Gemma 4 12B (text, also inside the multimodal models)"),
    SupportedModels("gpt_oss", "gpt-oss (20b, 120b)"),
    SupportedModels("mistral", "Mistral"),
    SupportedModels("ministral", "Ministral (8B of 2024)"),
    SupportedModels("ministral3", "Ministral 3 (text, also inside the multimodal models)"),
    SupportedModels("mixtral", "Mixtral"),
    SupportedModels("phi", "Phi-1.5, Phi-2"),
    SupportedModels("phi3", "Phi-3, Phi-4-mini"),
    SupportedModels("glm", "GLM-4 (9B of 2024), GLM-Edge"),
    SupportedModels("glm4", "GLM-4 (9B and 32B of 2025)"),
    SupportedModels("glm4_moe", "GLM-4.5, GLM-4.6, GLM-4.7 (also Air)"),
    SupportedModels("granite", "Granite 3"),
    SupportedModels("granitemoe", "Granite 3 MoE"),
    SupportedModels("granitemoeshared", "Granite MoE with a shared expert"),
    SupportedModels("granite_swa", "Granite with windows and sinks"),
    SupportedModels("granitemoe_swa", "Granite MoE with windows and sinks"),
    SupportedModels("lfm2", "LFM2, LFM2.5"),
    SupportedModels("lfm2_moe", "LFM2-MoE (LFM2-8B-A1B)"),
    SupportedModels("lfm3", "LFM3"),
    SupportedModels("olmo", "OLMo"),
    SupportedModels("olmo2", "OLMo 2"),
    SupportedModels("olmo3", "OLMo 3"),
    SupportedModels("olmo_hybrid", "OLMo-hybrid"),
    SupportedModels("olmoe", "OLMoE"),
    SupportedModels("flex_olmo", "FlexOlmo"),
    SupportedModels("exaone", "EXAONE 3, EXAONE 3.5, EXAONE Deep"),
    SupportedModels("exaone4", "EXAONE 4"),
    SupportedModels("exaone_moe", "K-EXAONE"),
    SupportedModels("mellum", "Mellum 2"),
    SupportedModels("laguna", "Laguna"),
    SupportedModels("muse_glimmer_text", "Muse-Glimmer (text, also inside the multimodal models)"),
    SupportedModels("seed_oss", "Seed-OSS"),
    SupportedModels("ernie4_5", "ERNIE 4.5 0.3B"),
    SupportedModels("ernie4_5_moe", "ERNIE 4.5 with experts (21B-A3B, 300B-A47B)"),
    SupportedModels("hunyuan_v1_dense", "Hunyuan (0.5B to 7B)"),
    SupportedModels("hunyuan_v1_moe", "Hunyuan-A13B"),
    SupportedModels("hy_v3", "Hy3"),
    SupportedModels("minimax_m2", "MiniMax-M2"),
    SupportedModels("dots1", "dots.llm1"),
    SupportedModels("internlm3", "InternLM 3"),
    SupportedModels("iquestcoder", "IQuest-Coder"),
    SupportedModels("cohere", "Command R, Aya 23"),
    SupportedModels("cohere2", "Command R7B, Command A, Tiny Aya"),
    SupportedModels("afmoe", "Trinity (AFMoE)"),
    SupportedModels("apertus", "Apertus (8B, 70B)"),
    SupportedModels("arcee", "Arcee Foundation Models (AFM-4.5B)"),
    SupportedModels("solar_open", "Solar Open"),
    SupportedModels("nemotron", "Nemotron-4, Minitron"),
    SupportedModels("helium", "Helium"),
    SupportedModels("starcoder2", "StarCoder2"),
    SupportedModels("stablelm", "StableLM 2"),
    SupportedModels("gpt2", "GPT-2"),
    SupportedModels("gpt_neox", "GPT-NeoX, Pythia"),
    SupportedModels("nanochat", "nanochat"),
    SupportedModels("cwm", "Code World Model"),
    SupportedModels("hyperclovax", "HyperCLOVA X SEED"),
    SupportedModels("jais2", "Jais 2"),
    SupportedModels("sarvam_moe", "Sarvam 30B"),
    SupportedModels("kolibri1", "Kolibri"),
    SupportedModels("flint", "Flint"),
    SupportedModels("bert", "BERT (all-MiniLM, bge, e5, gte): encoders, which embed", "all-MiniLM-L6-v2"),
    SupportedModels("distilbert", "DistilBERT (multi-qa-distilbert): encoders, which embed"),
    SupportedModels("electra", "ELECTRA (ms-marco-electra-base): encoders, which embed and rank"),
    SupportedModels("roberta", "RoBERTa: encoders, which embed"),
    SupportedModels("xlm-roberta", "XLM-RoBERTa (bge-m3, multilingual-e5): encoders, which embed"),
    SupportedModels("nomic_bert", "Nomic-BERT (nomic-embed-text v1.5): encoders, which embed"),
    SupportedModels("modernbert", "ModernBERT (gte-modernbert, granite-embedding-r2): encoders, which embed"),
)
