"""`overland generate`: what a checkpoint says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import user_errors


@user_errors
def generate(
    path: Annotated[Path, typer.Argument(help="A run folder, or one of its step_N checkpoints.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "import ",
    chat: Annotated[
        str | None, typer.Option(help="A question, which the chat template writes, in its place.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens to add at most.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.8,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
) -> None:
    """Let a checkpoint continue a text, or answer a question."""
    from overland.config.schema import JobConfig
    from overland.data.sft import end_of_turn, question
    from overland.tools.evaluation.generate import generate as generate_ids
    from overland.tools.evaluation.model import open_model

    opened = open_model(path)
    model, tokenizer, config = opened.model, opened.tokenizer, opened.config or JobConfig()
    end_id = tokenizer.end_id
    if chat is None:
        given = tokenizer.encode_prompt(prompt)
    else:
        given, end_id = question(config, tokenizer, chat), end_of_turn(config, tokenizer)
    ids = generate_ids(
        model,
        given,
        num_tokens=num_tokens,
        context=opened.context,
        temperature=temperature,
        seed=seed,
        end_id=end_id,
        device=next(model.parameters()).device,
    )
    if chat is None:
        print(prompt + tokenizer.decode(list(ids), after=tokenizer.encode(prompt)))
    else:
        print(tokenizer.decode(list(ids)).strip())
