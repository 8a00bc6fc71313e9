// Colour random code when it has ended: its tokens stay. Return the kinds of colours.
Promise.all([import('/page/tokens.js'), import('/page/answer.js')]).then(([tokens, { Answer }]) => {
  const signs = ['"', "'", '`', '/*', '*/', '//', '#', '<!--', '-->', '\n', '\\', ' ', 'def ', 'return', 'x1', '0x1F',
    '1.5', '<img src=x onerror=alert(1)>', '</code><b>', '=', '--', '"'.repeat(3), '${', '}', 'SELECT'];
  const languages = ['python', 'js', 'rust', 'sql', 'css', 'html', 'unknown', ''];
  let seed = 1;
  const random = (count) => (seed = (seed * 1103515245 + 12345) % 2147483648) % count;
  const kinds = new Set();
  for (let round = 0; round < 400; round++) {
    const pieces = ['```', languages[round % languages.length], '\n'];
    for (let i = random(60); i >= 0; i--) pieces.push(signs[random(signs.length)]);
    pieces.push('\n```\n');
    const answer = new Answer('/v1/chat/completions', {});
    const view = new tokens.TokenView(answer, false);
    for (const text of pieces) {
      answer.tokens.push({ id: 0, bytes: [], origin: 'sampled', logprob: null, top: null });
      answer.tokenText.push([...new TextEncoder().encode(text)]);
      answer.content += text;
    }
    view.update();
    const code = view.element.querySelector('pre > code');
    const plain = Array.from(code.children, (each) => [each.dataset.i, each.textContent]);
    if (code.querySelector('[class^=code-]')) throw new Error('an answer that still grows is coloured');
    answer.state = 'done';
    view.update();
    const after = Array.from(code.children, (each) => [each.dataset.i, each.textContent]);
    if (JSON.stringify(plain) !== JSON.stringify(after))
      throw new Error('tokens have changed of ' + JSON.stringify(pieces));
    for (const each of code.querySelectorAll('*')) {
      if (each.tagName !== 'SPAN') throw new Error(each.tagName + ' of ' + JSON.stringify(pieces));
      if (each.className.startsWith('code-')) kinds.add(each.className);
    }
  }
  return [...kinds].sort();
})
