"""Short chat templates that write tools, calls and results as the templates of public models do.

Each is a file of `data/tool-templates`. Its line ends have no meaning, and a backslash with n is a line end.
They are written after the models' own templates (Apache-2.0 or MIT: Qwen2.5, Qwen3-Coder, Qwen3.5, Mistral v3, v7 and
v13, Granite 3.3, Phi-4-mini, SmolLM3, DeepSeek-V3.1, GLM-4.6 and 4.7, MiniMax-M2, Seed-OSS, Gemma 4) and the published
prompt formats of Llama 3.1, LFM2, FunctionGemma, gpt-oss, Firefunction, Command R+, Command R7B, Hunyuan, Jamba,
Apertus.
"""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "tool-templates"
FORMATS = (
    *("hermes", "qwen3-coder", "mistral", "mistral-v3", "mistral-v11", "mistral-call-id", "glm-4.5", "glm-4.7"),
    *("seed-oss", "llama", "granite", "phi-4-mini", "lfm2", "deepseek-v3.1", "functools", "functiongemma", "gemma-4"),
    *("minimax-m2", "harmony", "json", "hunyuan", "jamba", "command-r7b", "apertus"),
)


def template_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").replace("\n", "").replace("\\n", "\n")


TEMPLATES = {name: template_of(name) for name in FORMATS}
ALTERNATING = template_of("alternating")
# LFM2's template only lists tools. LFM2.5's has no control tokens around the list. The third one shows past calls.
LFM2_LISTS = {"<|tool_list_start|>": template_of("lfm2-list"), "List of tools: [": template_of("lfm2.5-list")}
LFM25_CALLS = template_of("lfm2.5-calls")
QWEN35 = template_of("qwen3.5")  # its generation prompt opens the reasoning
GEMMA4_FIRST = template_of("gemma-4-first")  # Gemma 4's first template: results are in the calls' message
TOOLS_ALONE = template_of("firefunction")  # it works only with tools
