"""JUnit XML of a gate: one test case for each task of each candidate, for CI systems that show tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from halfbyte.records.errors import UserError
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, Judgement
from halfbyte.reports.tables import SET_METRIC, check_one_baseline, labels
from halfbyte.reports.verdict import CANARY, PERPLEXITY, missing_rows

_ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML 1.0


def junit(comparisons: Sequence[Comparison]) -> str:
    """A failed task is a failure, an open one or an anomaly an error, an advisory or waived one skipped if it fails.

    A canary that failed is a case of its own: the tasks' scores, which may look well, are then of no worth.

    Raises:
        UserError: when there is no comparison, or one was not judged.
    """
    check_one_baseline(comparisons)
    suites = ElementTree.Element("testsuites", name="halfbyte gate")
    _, names = labels(comparisons)
    for label, one in zip(names, comparisons, strict=True):
        if one.verdict is None or one.policy is None:
            raise UserError(f"the comparison of {label} was not judged", "compare with a policy")
        name = _legal(f"{label} ({one.policy.name})")
        suite = ElementTree.SubElement(suites, "testsuite", name=name, timestamp=one.created)
        if one.canary_failure is not None:
            case = ElementTree.SubElement(suite, "testcase", classname=_legal(label), name=CANARY)
            ElementTree.SubElement(case, "error", message=_legal(one.canary_failure), type="anomaly")
        for row in one.tasks:
            if row.judgement is None:
                continue
            text = (
                f"loss {figures.figure(row.result.loss)}, interval {figures.interval(row.result.interval)}, "
                f"margin {figures.figure(row.judgement.margin)}"
            )
            if row.metric in one.policy.bounds and row.bounds is not None:
                text += f", by the policy between {row.bounds[0]:g} and {row.bounds[1]:g}"
            _case(suite, label, row.task, row.judgement, text)
        for missing, reason in missing_rows(one, one.policy).items():
            case = ElementTree.SubElement(suite, "testcase", classname=_legal(label), name=_legal(missing))
            ElementTree.SubElement(case, "error", message=_legal(reason), type="inconclusive")
        for figure in one.set_metrics:
            case = ElementTree.SubElement(
                suite, "testcase", classname=_legal(label), name=_legal(f"{figure.task} {figure.metric}")
            )
            text = f"{figures.figure(figure.baseline)} to {figures.figure(figure.candidate)}: {SET_METRIC}"
            ElementTree.SubElement(case, "skipped", message=_legal(text), type="diagnostic")
        if one.fidelity is not None and one.fidelity.judgement is not None:
            ratio = figures.figure(one.fidelity.ratio)
            text = f"perplexity ratio {ratio}, interval {figures.interval(one.fidelity.ratio_interval)}"
            _case(suite, label, PERPLEXITY, one.fidelity.judgement, text)
        for name in ("failure", "error", "skipped"):
            count = len(suite.findall(f"testcase/{name}"))
            suite.set({"failure": "failures", "error": "errors", "skipped": "skipped"}[name], str(count))
        suite.set("tests", str(len(suite.findall("testcase"))))
        properties = ElementTree.Element("properties")
        ElementTree.SubElement(properties, "property", name="verdict", value=one.verdict.verdict)
        ElementTree.SubElement(properties, "property", name="sentence", value=_legal(one.verdict.sentence))
        suite.insert(0, properties)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, label: str, name: str, judgement: Judgement, text: str) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=_legal(label), name=_legal(name))
    if judgement.verdict == "pass":
        return
    if not judgement.primary:
        kind, text = "skipped", f"advisory {judgement.verdict}: {text}"
    elif judgement.waiver is not None:
        kind, text = "skipped", f"waived {judgement.verdict} ({judgement.waiver.by}): {text}"
    else:
        kind = "failure" if judgement.verdict == "fail" else "error"
    ElementTree.SubElement(case, kind, message=_legal(text), type=judgement.verdict)


def _legal(text: str) -> str:
    return _ILLEGAL.sub("�", text)
