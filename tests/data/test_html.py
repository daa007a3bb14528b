"""What a reader sees of a web page or a text in Markdown is what comes, and nothing else."""

import time

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.documents.file_readers import read_document
from specextend.documents.text import DocumentOptions
from tests.job.conftest import specextend


def read(text, kind="html", **options):
    return read_document(kind, text.encode(), DocumentOptions(**options))


def seen(page):
    """Text of a page, and the number of characters that it hides."""
    got = read(page)
    return got["text"], got["hidden_characters"]


NESTED = "<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mi>c</mi></mfrac><msub><mi>x</mi><mi>i</mi></msub>"
SUM = "<munderover><mo>\u2211</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover></math>"
TEX = '<annotation encoding="application/x-tex">{\\displaystyle E=mc^{2}}</annotation></semantics></math>'
ENERGY = f"<math><semantics><mrow><mi>E</mi><mo>=</mo><mi>m</mi><msup><mi>c</mi><mn>2</mn></msup></mrow>{TEX}"


@pytest.mark.parametrize(
    "page, text",
    {
        # words of two blocks are two words
        "<main>a</main><aside>b</aside><figure><figcaption>c</figcaption></figure>d": "a\nb\nc\nd",
        "<pre>a<br>b\n<div>c</div>d</pre>": "a\nb\nc\nd",
        "a<span style='display: block'>b</span>c<table><td>d<td>e</table>": "a\nb\nc\nd e",
        "<svg><title>out</title><text>a</text><text>b</text></svg>": "a b",
        "Donau\u00addampf<wbr>schiff\u200bfahrt <ruby>\u6f22<rt>kan</rt></ruby>": "Donaudampfschifffahrt \u6f22(kan)",
        # forms
        "<label><input type=radio checked>Yes</label><label><input type=radio>No</label><input value=Ann>"
        "<input type=hidden value=out><input type=submit value=out>"
        "<input type=password value=out>": "[x] Yes [ ] No Ann",
        "<select><option>a<option>b</select><select multiple><option>a<option selected>c<option selected>d"
        "</select>": "a c d",
        "Text:<textarea>one\ntwo</textarea><select><option>a<option selected>one</select>": "Text:\none\ntwo\none",
        # numbers, units, notes
        "10<sup>6</sup> m<sup>2</sup> 10<sup>-6</sup>"
        " x<sup>n+1</sup> e<sup>x<sup>2</sup></sup>": "10^6 m^2 10^-6 x^(n+1) e^(x^2)",
        "2<sup>3</sup>4 a<sub>1</sub>2 H<sub>2</sub>O"
        " log<sub>2</sub> 8 1<sup>st</sup>": "2^(3)4 a_(1)2 H2O log_2 8 1st",
        "3<sup>1</sup>\u2044<sub>2</sub> cups of <sup>14</sup>C"
        ", SO<sub>4</sub><sup>2-</sup>": "3 1/2 cups of ^14C, SO4^2-",
        "in 2019<sup>1</sup>, 45%<sup>2</sup>"
        "<table><td>1,000<sup>2</sup><td>7<sup>*</sup>": "in 2019[1], 45%[2]\n1,000[2] 7*",
        "<p>Ann Smith<sup>2</sup>, 3 km<sup>2</sup><p><sup>2</sup>Institute": "Ann Smith[2], 3 km^2\n[2]Institute",
        "a 10<sup><a href='#n'>1</a></sup> b<a href='#m'><sup>[2]</sup></a>"
        " c<a role=doc-noteref>3</a>": "a 10[1] b[2] c[3]",
        "5<sup class=footnote>7</sup> 10<span style='vertical-align: super'>6</span>": "5[7] 10^6",
        # one form of a formula
        f"<span class=katex><span class=katex-mathml>{ENERGY}</span>"
        "<span class=katex-html>E=mc2</span></span>": "E=mc^{2}",
        f"<span class=mwe-math-element><span style='display:none'>{ENERGY}</span><img alt=out></span>": "E=mc^{2}",
        "<span class=MathJax>x2</span><script type='math/tex'>x^2</script> <img class=math alt='y^2'>": "x^2 y^2",
        ENERGY.replace(TEX, "</semantics></math>") + NESTED + SUM: "E=mc^2(a+b)/c x_i\u2211_(i=1)^n",
        "a <math><msqrt><mi>x</mi></msqrt></math>": "a \u221ax",
        "<math><mroot><mn>8</mn><mn>3</mn></mroot><msqrt><mi>x</mi><mi>y</mi></msqrt></math>": "8^(1/3)\u221a(xy)",
        "<math><mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr><mtr><mtd>3</mtd></mtr></mtable></math>": "((1, 2), (3))",
        # struck text, and links of headings to themselves
        "<del>500</del> 400 <s> a <b>b</b></s> <del>c<br>d</del>": "~~500~~ 400 ~~a b~~ ~~c~~\n~~d~~",
        "a <s><s>b</s> c<sup>2<del>3</del></sup></s><del><p>d</p></del><del> </del>e": "a ~~b c^(23)~~\n~~d~~\ne",
        "<h1>Abstract<a class=headerlink href='#a'>\u00b6</a></h1><h2><a href='#b'>#</a> Two</h2>": "Abstract\nTwo",
        # shadow roots
        "<x-card><b slot=x>B</b>light<template shadowrootmode=open><p>see <slot name=x>out</slot>: <slot></slot>."
        "</p></template></x-card>end": "see B: light.\nend",
    }.items(),
)
def test_what_a_reader_sees_is_what_comes(page, text):
    """`10<sup>6</sup>` was 106, a formula came twice, nobody knew which box was ticked, words were glued together."""
    assert read(page)["text"] == text


@pytest.mark.parametrize(
    "part", ["a<sup>2</sup>", "<s>a</s>", "<pre>a</pre>", ENERGY, NESTED + "</math>", "a<p hidden>b"]
)
def test_a_long_page_takes_time_by_its_length(part):
    """A reference of 8,000 examples or notes took 40 seconds, with four times as many an hour."""
    begin = time.monotonic()
    read(part * 20_000)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    "page",
    [
        "a<p hidden>{}",
        "a<p style='color:red; DISPLAY : none'>{}",
        "a<p style='visibility:hidden'>{}",
        "a<template>{}</template>",
        "a<noscript>{}</noscript>",
        "a<dialog>{}</dialog>",
        "<style>.x, #y{{display:none}}</style>a<p class='a x'>{}",
        "<style>/*}}*/p#y{{visibility:hidden}}</style>a<p id=y>{}",
        "<style>@media print{{p{{display:block}}}}p.x{{display:none}}</style>a<p class=x>{}",
    ],
)
def test_what_no_reader_sees_stays_out_and_is_counted(page):
    """Text for machines is where instructions to a model hide."""
    assert seen(page.format("se cret</p>") + "<div>b") == ("a\nb", len("secret"))


@pytest.mark.parametrize(
    "page",
    [
        "<style>p{display:none}</style><p style='display:block'>seen",
        "<style>.x{display:none}.x.on{display:block}</style><p class='x on'>seen",
        "<style>.x{display:none}@media(min-width:9em){.x{display:block}}</style><p class=x>seen",
        "<style>@media print{.x{display:none}}@media(max-width:9em){p{display:none}}</style><p class=x>seen",
        "<style>.x{display:none}div:hover .x{display:block}</style><div><p class=x>seen",
        "<style>body{visibility:hidden}html{display:none}</style><p>seen",
        "<style>p:hover{display:none} p:::x{display:none} .x{</style><p>seen",
        "<style>.x{visibility:hidden}.x b{visibility:visible}</style><p class=x><b>seen",
        "<p hidden=until-found>seen",
        "<p aria-hidden=true>seen",
        "<details><summary>seen",
        "<dialog open>seen",
    ],
)
def test_what_some_reader_sees_stays(page):
    """A page for wide screens, a menu that opens, and one that its script shows are content."""
    assert seen(page) == ("seen", 0)


LAYOUTS = ["has-sidebar", "no-cookies", "with_menu", "js-navbar", "sidebar", "footer", "main-menu"]


@given(*(st.lists(st.sampled_from(LAYOUTS), max_size=2).map(" ".join) for _ in range(3)), st.sampled_from(LAYOUTS[:4]))
def test_no_name_deletes_the_main_text(root, body, main, part):
    """A class of `html` made a page damaged, and one of its layout an empty one."""
    page = f"<html class='{root}'><body class='{body}'><nav>Menu</nav><div id='{main}'>{'Long text. ' * 9}</div>"
    got = read(f"{page}<div class='{part}'>Short.</div><div class=site-footer>Foot", main_only=True)
    assert got["text"] == "Long text. " * 8 + "Long text.\nShort."
    assert got["left_out_characters"] == len("MenuFoot")


def test_a_page_that_loses_more_than_half_is_named(tmp_path):
    """What surrounds the main part is left out by choice, nobody is to miss what was not asked away."""
    (tmp_path / "a.html").write_text(
        "<body class=cookie-ok><header>Top</header><nav>Menu</nav><main class=menu><p>Text</main>"
        "<div id=CookieBanner><p>We value you</div><footer>Bottom</footer>"
    )
    (tmp_path / "b.html").write_text("<nav>Menu</nav><p>Text that is long")
    (tmp_path / "c.html").write_text("<nav>One</nav><footer>Two")
    for flags, code, text in (("", 0, "Top\nMenu\nText\nWe value you\nBottom"), ("--main-only", 3, "Text")):
        output = tmp_path / f"out{code}"
        ended = specextend(f"prepare documents {tmp_path}/*.html {flags} --output {output}").exits(code)
        table = pq.read_table(output).sort_by("id")
        assert table["text"][0].as_py() == text
    assert table["left_out_characters"].to_pylist() == [23, 4]
    assert f"left out: {tmp_path}/a.html lost more than half of its text to --main-only" in ended.stderr
    assert "c.html has no text but that which --main-only leaves out" in ended.stderr
    assert "left out characters: 27;" in ended.stdout


@pytest.mark.parametrize(
    "text, title",
    {
        "---\ntitle: 'A: B'\n---\n# Other": "A: B",
        "+++\ntitle = 'A'\n+++\n# Other": "A",
        "---\nno: [title\n---\n\n# A": "no: [title",
        "<!-- # out -->\n\n```\n# out\n```\n~~~sh\n# out\n~~~\n\nA **b** `c`\n===": "A b c",
        "# ![logo](a.png)\n\n## A [link](b) ##": "A link",
        "<!-- x -->\n<h1 align=center>A</h1>\n\n# Other": "A",
        "# A {#anchor}": "A",
        "# a" + " " * 400_000 + "b ##": "a b",
    }.items(),
)
def test_the_title_of_a_text_in_markdown_is_that_which_its_reader_sees(text, title):
    """It was a comment in a script. One with 400,000 spaces took minutes."""
    begin = time.monotonic()
    assert read(text, "markdown")["title"] == title
    assert time.monotonic() - begin < 60


def test_markdown_stays_as_it_is_written_but_for_payload_and_comments():
    """An image in Base64 took a hundred thousand tokens of a text of two pages."""
    text = "- [x] done ~~500~~ <!-- kept -->\n\n`data:,short`\n\n```\n<!-- kept -->\n```\n"
    payload = "A+/=" * 99
    images = f"![a](data:image/png;base64,{payload}) ![c](data:image/gif;base64,R0lG)"
    got = read(f"<!-- out\nout -->\n{text}{images}\n\n[b]: <data:x/y,{payload}>\n", "markdown")
    assert got["text"] == f"\n{text}![a](data:image/png;base64,) ![c](data:image/gif;base64,)\n\n[b]: <data:x/y,>\n"
    assert got["hidden_characters"] == 2 * len(payload) + len("R0lG<!-- out\nout -->")
