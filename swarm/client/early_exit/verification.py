"""Whether tokens that left early stand, once the full model's answer is there. Pure but for random numbers.

Greedy tokens stand if the full model chooses the same. Sampled ones stand with a probability, and are replaced by
others otherwise, such that what comes out has the full model's distribution (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, section 2.3 and appendix A.1).
"""

from __future__ import annotations

import torch


def verify_sampled(
    guess_R: torch.Tensor,
    guess_scores_RV: torch.Tensor,
    scores_RV: torch.Tensor,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Tokens that are distributed as the full model says, `[R]`: the guesses, or others in their place.

    Args:
        guess_R: tokens that were drawn from the softmax of `guess_scores_RV`.
        guess_scores_RV: processed logits where the tokens left.
        scores_RV: the full model's processed logits.
        generator: of random numbers, on the device of the tokens; None for torch's own.
    """
    expected_RV, guessed_RV = scores_RV.float().softmax(-1), guess_scores_RV.float().softmax(-1)
    place_R1 = guess_R.unsqueeze(1)
    ratio_R = (expected_RV.gather(1, place_R1) / guessed_RV.gather(1, place_R1)).squeeze(1)
    stands_R = torch.rand(len(guess_R), generator=generator, device=guess_R.device) < ratio_R
    rest_RV = (expected_RV - guessed_RV).clamp(min=0)
    # Where both distributions are the same up to rounding, nothing is rejected, but a sum of zero could not be sampled.
    rest_RV = torch.where(rest_RV.sum(-1, keepdim=True) > 0, rest_RV, expected_RV)
    other_R = torch.multinomial(rest_RV, 1, generator=generator).squeeze(1)
    return torch.where(stands_R, guess_R, other_R)
