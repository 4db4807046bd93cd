"""Sections of the studies' pages."""

import pytest

from experiments import results


def test_a_section_is_replaced_between_its_markers_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    results.replace_section(page, "table", "new")
    assert page.read_text() == "before\n<!-- table -->\nnew\n<!-- /table -->\nafter\n"
    with pytest.raises(ValueError, match="no section <!-- other -->"):
        results.replace_section(page, "other", "new")
    assert "other" not in page.read_text()


def test_results_sent_elsewhere_need_no_page(tmp_path):
    results.replace_section(tmp_path / "README.md", "table", "new")
    assert not list(tmp_path.iterdir())
