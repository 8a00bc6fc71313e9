// Read random Markdown: no word is lost. Return the tags of all elements.
import('/page/markdown.js').then(({ markdownBlocks }) => {
  const signs = ['#', '*', '_', '`', '~', '[', ']', '(http://a)', '>', '- ', '|', '\n', ' ', '\\', 'word', '1. ', '<b>',
    '```', '**'];
  const tags = new Set();
  let seed = 1;
  const random = (count) => (seed = (seed * 1103515245 + 12345) % 2147483648) % count;
  for (let round = 0; round < 1500; round++) {
    const source = Array.from({ length: 1 + random(60) }, () => signs[random(signs.length)]).join('');
    const root = document.createElement('div');
    root.append(...markdownBlocks(source, 0, (start, end) => source.slice(start, end)).map((block) => block.node));
    const count = (text) => text.split('word').length;
    if (count(root.textContent) !== count(source)) throw new Error('words are lost of ' + JSON.stringify(source));
    for (const each of root.querySelectorAll('*')) tags.add(each.tagName);
  }
  return [...tags];
})
