from convolve.errors import ConfigError, DataError, suggest, to_one_line


def test_a_message_is_one_line_for_any_name_in_it():
    message = str(DataError("runs/a\nb\x1b[2J\u202e: no such folder"))
    assert message == r"runs/a\nb\x1b[2J\u202e: no such folder"


def test_letters_of_any_language_stay_as_they_are():
    assert to_one_line("数据 – naïve") == "数据 – naïve"


def test_an_error_can_carry_another_error():
    assert str(ConfigError(ValueError("three"))) == "three"


def test_the_nearest_names_are_listed_or_all_of_a_short_list():
    assert suggest("adm", ["adam", "sgd"]) == "did you mean adam?"
    assert suggest("xyz", ["adam", "sgd"]) == "known: adam, sgd"
    assert suggest("xyz", map(str, range(30))).endswith("and 6 more")
