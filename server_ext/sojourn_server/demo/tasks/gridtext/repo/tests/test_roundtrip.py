import unittest

from gridtext.dialect import SEMICOLON, TSV, guess
from gridtext.reader import ParseError, read
from gridtext.writer import columns, write


class ReaderTest(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(list(read("a,b\n1,2\n")), [["a", "b"], ["1", "2"]])

    def test_quoted_separator_and_newline(self):
        self.assertEqual(list(read('"a,b","c\nd"\n')), [["a,b", "c\nd"]])

    def test_last_line_without_newline(self):
        self.assertEqual(list(read("a,b\n1,")), [["a", "b"], ["1", ""]])

    def test_doubled_quote(self):
        self.assertEqual(list(read('"say ""hi""",x\n')), [['say "hi"', "x"]])

    def test_errors(self):
        for text in ('"open', '"a"b\n'):
            with self.assertRaises(ParseError):
                list(read(text))


class RoundTripTest(unittest.TestCase):
    def test_awkward_cells(self):
        rows = [["plain", 'qu"ote', "two\nlines", "semi;colon", ""], ["", '""', ";", "\t", "end"]]
        for dialect in (SEMICOLON, TSV):
            self.assertEqual(list(read(write(rows, dialect), dialect)), rows)

    def test_guess(self):
        self.assertEqual(guess("a;b;c,d"), SEMICOLON)

    def test_columns(self):
        self.assertEqual(columns([["ab", 1], ["c", 10]]), "ab   1\nc   10")


if __name__ == "__main__":
    unittest.main()
