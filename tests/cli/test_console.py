"""What the commands print is what was said: words are neither markup nor pictures."""

import pytest
from rich.table import Table

from guided_spec.cli.console import print_table, stderr, stdout

WORDS = "eagle3:mask: [/properties/a] [bold] :smile: 'x'"


def test_words_of_results_and_reports_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdout().print(WORDS)
    stderr().print(WORDS)
    table = Table("proposer")
    table.add_row(WORDS)
    print_table(table)
    printed = capsys.readouterr()
    assert printed.out.count(WORDS) == 2
    assert printed.err.strip() == WORDS
