"""What a GGUF file calls the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import re

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight."""
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, inside, kind = match.groups()
        return f"blk.{layer}.{INSIDE.get(inside, inside)}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP.get(stem, stem)}.{kind}"
