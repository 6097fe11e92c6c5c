"""What the property tests share: how hypothesis searches, and made-up logs.

The same examples every time, so that a failure is one for everybody. SELFSPEC_EXAMPLES=search searches at random, and
longer; SELFSPEC_EXAMPLES=few, which mutation testing uses, asks only whether there is a failure."""

import os

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES, features

settings.register_profile("same", max_examples=50, derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=2000, database=None, deadline=None)
settings.register_profile("few", settings.get_profile("same"), max_examples=10, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("SELFSPEC_EXAMPLES", "same"))

rates = st.floats(0, 1)


@st.composite
def logs(draw):
    """A log of drafts of up to four tokens, any statistic in its gate's range."""
    k, rounds = 4, draw(st.integers(1, 12))
    drafted = torch.tensor([draw(st.integers(1, k)) for _ in range(rounds)])
    accepted = torch.tensor([draw(st.integers(0, int(length))) for length in drafted])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spans = [GATES[name].statistic_range(100) for name in features()]
    statistics = torch.stack(
        [low + (high - low) * torch.rand(rounds, k, generator=generator) for low, high in spans], dim=-1
    )
    statistics[torch.arange(k) >= drafted.unsqueeze(1)] = torch.nan
    return DraftLog(statistics, drafted, accepted, torch.arange(rounds) // 2, features())
